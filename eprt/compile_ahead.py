"""Compiles Triton kernels in several processes, into the cache on disk that this process then reads.

A warm-up is called twice: first within `eprt.launching.recording`, which collects what it would compile, then for real.
In between processes of our own compile what isn't in the cache, each one kernel after another. They use no GPU: Triton
compiles for a named one. So a machine without a GPU can do it, too (`eprt warm`).
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from io import BufferedRWPair
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager, triton_key

from eprt.launching import INTERPRETED, Specialization, name_callees_first, recording, shared_cache
from eprt.support import Device

logger = logging.getLogger(__name__)
PROCESSES = "EPRT_COMPILE_PROCESSES"  # how many at most; 0: each kernel is compiled where it is first needed
FEWEST = 4  # kernels for which starting processes pays: they import torch first
MOST_PROCESSES = 32
PATIENCE = 180.0  # seconds that a process gets for a kernel; the first of each for its start too
_MARK = "eprt-compiled"
_WORKER = "from eprt.compile_ahead import serve; serve()"
_along: list[Specialization] = []  # what the next `compile_ahead` compiles beside its own


def compile_ahead(
    warmup: Callable[[], object], device: torch.device, *, begin: float = 0.0, share: float = 1.0
) -> None:
    """Calls `warmup` once its kernels are compiled, all at once instead of one after another.

    Args:
        begin, share: of all processes of this host that call this with the same kernels at the same time: where this
            one's part of the kernels begins, 0 to 1, and what part of the processors it takes, at least a GPU's.
    """
    processes = _processes(max(share, 1 / max(1, torch.cuda.device_count())))
    if INTERPRETED or device.type != "cuda" or processes < 2:
        warmup()
        return
    with recording() as found:
        warmup()
    try:
        compile_all(found + _along, Device.of(device), processes, begin=begin)
    except Exception:  # it saves time: without it the warm-up does the same
        logger.warning("eprt: kernels aren't compiled ahead, but each when it is first needed", exc_info=True)
    warmup()


@contextmanager
def compiled_along(warmup: Callable[[], object]) -> Iterator[None]:
    """Has a `compile_ahead` of the block also compile what `warmup` needs: alone it would be too little to start
    processes for. The kernels are loaded when the block ends."""
    if INTERPRETED:
        yield
        return
    with recording() as found:
        warmup()
    _along.extend(found)
    try:
        yield
    finally:
        _along.clear()
    for each in found:
        each.load()


def _processes(share: float) -> int:
    asked = os.environ.get(PROCESSES, "")
    most = int(asked) if asked.isdigit() else MOST_PROCESSES
    return min(most, int(len(os.sched_getaffinity(0)) * share))


def compile_all(
    found: list[Specialization], target: Device, processes: int, *, begin: float = 0.0, fewest: int = FEWEST
) -> int:
    """Compiles what isn't in the cache yet; returns how many kernels that were. What isn't compiled, as a process died,
    took longer than `PATIENCE` or met an error, is left to its first use, which raises the error; a warning says so.

    Args:
        begin: the part of the kernels that comes last, 0 to 1.  fewest: kernels for which processes are started.
    """
    start = time.monotonic()
    with shared_cache():
        jobs = {mark: spec for spec in found if (mark := _mark(spec, target))}
        # The longest first: warp-specialized kernels, then those with many constants.
        costs = {mark: (spec.kernel.is_gluon(), len(str(spec.named))) for mark, spec in jobs.items()}
        todo = [mark for mark in sorted(jobs, key=costs.__getitem__, reverse=True) if not _marked(mark)]
        if len(todo) < fewest:
            return 0
        processes = min(processes, len(todo))
        logger.info("eprt: compiling %d kernels in %d processes", len(todo), processes)
        first = int(len(todo) * begin)
        queue = iter([(mark, _pickled(jobs[mark])) for mark in todo[first:] + todo[:first]])  # of all threads
        modules = {jobs[mark].kernel.fn.__module__ for mark in todo}
        failures: list[str] = []
        # The processes end first: else threads would wait for them when this one is interrupted.
        with ThreadPoolExecutor(processes) as threads, _workers(target, modules, processes) as workers:
            done = sum(threads.map(partial(_drain, queue, failures), workers))
        left = sum(not _marked(mark) for mark in todo)
    logger.info("eprt: compiled %d kernels in %.1f s", done, time.monotonic() - start)
    if left:
        why = " ".join("; ".join(failures).split())[:400]
        logger.warning("eprt: %d of %d kernels are left to be compiled at their first use: %s", left, len(todo), why)
    return done


# ---- jobs ------------------------------------------------------------------------------------------------------------


def _pickled(spec: Specialization) -> bytes:
    function = spec.kernel.fn
    return pickle.dumps((function.__module__, function.__name__, spec.arguments, spec.named))


def _specialization(job: bytes) -> Specialization:
    module, name, arguments, named = pickle.loads(job)
    kernel = getattr(importlib.import_module(module), name)
    return Specialization(kernel, arguments, named)


def _mark(spec: Specialization, target: Device) -> str:
    """Returns the key under which the cache remembers that a kernel was compiled, by the same version of everything;
    empty for one that another process can't import."""
    function = spec.kernel.fn
    module = sys.modules.get(function.__module__)
    if function.__module__ == "__main__" or getattr(module, function.__name__, None) is not spec.kernel:
        return ""
    name_callees_first(spec.kernel)
    text = f"{triton.__version__} {spec.kernel.cache_key} {target.sm} {spec.arguments} {spec.named}"
    return hashlib.sha256(text.encode()).hexdigest()


def _marked(mark: str) -> bool:
    return get_cache_manager(mark).get_file(_MARK) is not None


# ---- processes -------------------------------------------------------------------------------------------------------


@contextmanager
def _workers(target: Device, modules: set[str], count: int) -> Iterator[list[socket.socket]]:
    """Starts `count` processes that compile jobs, and yields what connects to each. One more imports what all need,
    some seconds' work, and forks them. They end with the block, or when this process is gone and they would answer."""
    pairs = [socket.socketpair() for _ in range(count)]
    theirs = [each.fileno() for _, each in pairs]
    # Forked are neither a driver's state nor locks of other threads, as a library of linear algebra starts.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command, nowhere = [sys.executable, "-c", _WORKER, str(target.sm), ",".join(map(str, theirs))], subprocess.DEVNULL
    with subprocess.Popen(
        [*command, *sorted(modules)], stdin=nowhere, stdout=nowhere, stderr=nowhere, env=environment, pass_fds=theirs,
        start_new_session=True,
    ) as first:  # fmt: skip
        try:
            for own, other in pairs:
                other.close()
                own.settimeout(PATIENCE)
            yield [own for own, _ in pairs]
        finally:
            for own, _ in pairs:
                with suppress(OSError):
                    own.shutdown(socket.SHUT_RDWR)  # no more jobs; a thread that waits for an answer goes on
            with suppress(subprocess.TimeoutExpired):
                first.wait(2.0)
            with suppress(ProcessLookupError):
                os.killpg(first.pid, signal.SIGKILL)  # what is at work yet, with the compilers that it runs
            for own, _ in pairs:
                own.close()


def _drain(jobs: Iterator[tuple[str, bytes]], failures: list[str], worker: socket.socket) -> int:
    """Has a process compile jobs until none is left or it doesn't answer. Returns how many it compiled."""
    done, answers = 0, worker.makefile("rb")
    for mark, job in jobs:
        if _marked(mark):
            continue
        try:
            worker.sendall(pickle.dumps(job))
            failure = pickle.load(answers)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            failures.append(f"a process didn't answer: {error!r}")
            break
        if failure:
            failures.append(failure)
            continue
        get_cache_manager(mark).put("", _MARK, binary=False)
        done += 1
    return done


class _NamedTarget:
    """Stands in for Triton's driver where kernels are compiled for a GPU that needn't be here."""

    def __init__(self, sm: int) -> None:
        self._target = GPUTarget("cuda", sm, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


def compile_for(sm: int) -> None:
    """Lets this process compile for GPUs of that compute capability, and launch nothing."""
    driver.set_active(_NamedTarget(sm))  # pyright: ignore[reportArgumentType]


def serve() -> None:
    """Compiles jobs for the target that argv names, in a process for each of the sockets that argv names next; then
    come the modules of the kernels."""
    sm, descriptors, *modules = sys.argv[1:]
    sockets = [socket.socket(fileno=int(each)) for each in descriptors.split(",")]
    compile_for(int(sm))
    for module in modules:
        importlib.import_module(module)
    triton_key()  # a hash of all of Triton, remembered
    for index, own in enumerate(sockets):
        if os.fork() == 0:
            for other in sockets[index + 1 :]:
                other.close()  # else it would stay open when the process that it is for has died
            try:
                _answer(own.makefile("rwb"))
            finally:
                os._exit(0)
        own.close()
    for _ in sockets:
        os.wait()


def _answer(jobs: BufferedRWPair) -> None:
    """Compiles the jobs that come, and answers each with an error's text, empty if there was none."""
    while True:
        try:
            job = pickle.load(jobs)
        except EOFError:
            return
        answer = ""
        try:
            _build_launcher(_specialization(job).compile())
        except Exception as error:  # noqa: BLE001  (of any compiler stage; the kernel's first use raises it again)
            answer = f"{type(error).__name__}: {error}"
        pickle.dump(answer, jobs)
        jobs.flush()


def _build_launcher(kernel: Any) -> None:
    """Builds the C function by which Triton before 3.7 launches a kernel, where there is a CUDA driver to link to."""
    from triton.backends.nvidia import driver as nvidia

    if hasattr(nvidia, "make_launcher"):
        with suppress(Exception):
            nvidia.CudaLauncher(kernel.src, kernel.metadata)
