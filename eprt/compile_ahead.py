"""Compiles Triton kernels in several processes, into the cache on disk that this process then reads.

A warm-up is called twice: first within `eprt.launching.recording`, which collects what it would compile, then for real.
In between processes of our own compile what isn't in the cache, each one kernel after another. They use no GPU: Triton
compiles for a named one. So a machine without a GPU can do it, too (`eprt warm`), and an engine can go on meanwhile
(`start_compiling`).
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager, triton_key

from eprt.json_files import shown
from eprt.launching import INTERPRETED, Specialization, name_callees_first, recording, shared_cache
from eprt.support import Device

logger = logging.getLogger(__name__)
PROCESSES = "EPRT_COMPILE_PROCESSES"  # how many at most; 0: each kernel is compiled where it is first needed
FEWEST = 4  # kernels for which starting processes pays: they import torch first
MOST_PROCESSES = 32
PATIENCE = 180.0  # seconds without news of any process
_MARK = "eprt-compiled"
_WORKER = "from eprt.compile_ahead import serve; serve()"
_NUMBER = 4  # bytes of a job's number
_UNAIDED = "eprt: kernels aren't compiled ahead, but each when it is first needed"
_COMPILED, _THERE = "compiled", "another process of this host compiled it"
Job = tuple[str, str, str, tuple[Any, ...], dict[str, Any]]  # a kernel's mark, module and name; its Specialization
_along: list[Specialization] = []  # what the next `compile_ahead` compiles beside its own
_started: list[Compilation] = []  # what it waits for


def compile_ahead(
    warmup: Callable[[], object], device: torch.device, *, begin: float = 0.0, share: float = 1.0
) -> None:
    """Calls `warmup` once its kernels are compiled, all at once instead of one after another.

    Args:
        begin, share: of all processes of this host that call this with the same kernels at the same time: where this
            one's part of the kernels begins, 0 to 1, and what part of the processors it takes, at least a GPU's.
    """
    _wait()  # before asking what is left
    start_compiling(warmup, device, begin=begin, share=share)
    _wait()
    warmup()


def _wait() -> None:
    while _started:
        try:
            _started.pop().wait()
        except Exception:  # what isn't there is compiled by the warm-up
            logger.warning(_UNAIDED, exc_info=True)


def start_compiling(
    warmup: Callable[[], object], device: torch.device, *, begin: float = 0.0, share: float = 1.0
) -> None:
    """Starts to compile what `warmup` needs, as `compile_ahead` does, and returns: the next `compile_ahead` of any
    layer waits for it. Where nothing can be started, it says so in the log, and `warmup` compiles."""
    processes = _processes(max(share, 1 / max(1, torch.cuda.device_count())))
    if INTERPRETED or device.type != "cuda" or processes < 2:
        return
    try:
        with recording() as found:
            warmup()
        _started.append(Compilation(found + _along, Device.of(device), processes, begin=begin))
    except Exception:  # it saves time: without it the warm-up does the same
        logger.warning(_UNAIDED, exc_info=True)


@contextmanager
def compiled_along(warmup: Callable[[], object], *, load: bool = True) -> Iterator[None]:
    """Has a `compile_ahead` of the block also compile what `warmup` needs: alone it would be too little to start
    processes for. The kernels are loaded when the block ends, if at all."""
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
    for each in found if load else ():
        each.load()


def _processes(share: float) -> int:
    return min(_most_processes(os.environ.get(PROCESSES, "")), int(len(os.sched_getaffinity(0)) * share))


@cache
def _most_processes(asked: str) -> int:
    """Returns how many processes the variable allows. What is no number is named once in the log, and left aside."""
    if asked.isascii() and asked.isdigit() and len(asked) < 10:
        return int(asked)
    if asked:
        logger.warning("%s=%s: expected a number; up to %d processes compile", PROCESSES, shown(asked), MOST_PROCESSES)
    return MOST_PROCESSES


class Compilation:
    """Kernels that aren't in the cache yet, while other processes compile them. What isn't compiled, as a process died,
    nothing was heard of any for `PATIENCE`, or one met an error, is left to its first use, which raises the error.

    Args:
        begin: the part of the kernels that comes last, 0 to 1.  fewest: kernels for which processes are started.
    """

    def __init__(
        self, found: list[Specialization], target: Device, processes: int, *, begin: float = 0.0, fewest: int = FEWEST
    ) -> None:
        self._first: subprocess.Popen[bytes] | None = None
        with shared_cache():
            jobs = {mark: spec for spec in found if (mark := _mark(spec, target))}
            # The longest first: warp-specialized kernels, then those with many constants.
            costs = {mark: (spec.kernel.is_gluon(), len(str(spec.named))) for mark, spec in jobs.items()}
            todo = [mark for mark in sorted(jobs, key=costs.__getitem__, reverse=True) if not _marked(mark)]
            self._count = len(todo)
            if len(todo) < fewest:
                return
            processes = min(processes, len(todo))
            logger.info("eprt: compiling %d kernels in %d processes", len(todo), processes)
            first = int(len(todo) * begin)
            queue = [_job(mark, jobs[mark]) for mark in todo[first:] + todo[:first]]
            self._first = _start(target, queue, sorted({module for _, module, *_ in queue}), processes)

    def wait(self) -> int:
        """Returns how many kernels were compiled here; a warning says what is left."""
        if self._first is None:
            return 0
        waited = time.monotonic()
        with self._first as first:
            try:
                answers, failures = _answers(first, self._count)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(first.pid, signal.SIGKILL)  # what is at work yet, with the compilers that it runs
        done = answers.count(_COMPILED)
        logger.info("eprt: compiled %d kernels, waited %.1f s for them", done, time.monotonic() - waited)
        if left := self._count - len(answers):
            why = " ".join("; ".join(failures).split())[:400]
            logger.warning(
                "eprt: %d of %d kernels are left to be compiled at their first use: %s", left, self._count, why
            )
        return done


# ---- jobs ------------------------------------------------------------------------------------------------------------


def _job(mark: str, spec: Specialization) -> Job:
    function = spec.kernel.fn
    return mark, function.__module__, function.__name__, spec.arguments, spec.named


def _mark(spec: Specialization, target: Device) -> str:
    """Returns the key under which the cache remembers that a kernel was compiled, by the same version of everything;
    empty for one that another process can't import."""
    function = spec.kernel.fn
    module = sys.modules.get(function.__module__)
    if function.__module__ == "__main__" or getattr(module, function.__name__, None) is not spec.kernel:
        return ""
    name_callees_first(spec.kernel)
    arguments = [_described(each) for each in spec.arguments]
    text = f"{triton.__version__} {spec.kernel.cache_key} {target.sm} {arguments} {spec.named}"
    return hashlib.sha256(text.encode()).hexdigest()


def _described(argument: Any) -> Any:
    """Returns a tensor descriptor without the tensor, whose text follows torch's default dtype; others as they are."""
    return {**vars(argument), "base": argument.base.dtype} if hasattr(argument, "block_shape") else argument


def _marked(mark: str) -> bool:
    return get_cache_manager(mark).get_file(_MARK) is not None


# ---- processes -------------------------------------------------------------------------------------------------------


def _start(target: Device, jobs: list[Job], modules: list[str], processes: int) -> subprocess.Popen[bytes]:
    """Starts a process that imports what all need, some seconds' work, and forks those which compile. They end after
    the last job, or when this process is gone and they would answer."""
    # Forked are neither a driver's state nor locks of other threads, as a library of linear algebra starts.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with tempfile.TemporaryFile() as given:
        pickle.dump((target.sm, processes, modules), given)
        pickle.dump(jobs, given)  # by itself: what is in them is imported when the modules are
        given.seek(0)
        return subprocess.Popen(
            [sys.executable, "-c", _WORKER], stdin=given, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=environment, start_new_session=True,
        )  # fmt: skip


def _answers(first: subprocess.Popen[bytes], count: int) -> tuple[list[str], list[str]]:
    """Returns what processes said of kernels that are in the cache now, and why others aren't, when all have ended."""
    stream: Any = first.stdout
    poll, text, ended = select.poll(), b"", f"nothing was heard for {PATIENCE:.0f} s"
    poll.register(stream, select.POLLIN)
    while poll.poll(PATIENCE * 1000):
        part = os.read(stream.fileno(), 1 << 16)
        if not part:
            ended = "a process ended"
            break
        text += part
    lines = text.decode(errors="replace").splitlines()
    good = [line for line in lines if line in (_COMPILED, _THERE)]
    failures = [line for line in lines if line not in (_COMPILED, _THERE)]
    return good, failures if len(lines) == count else [*failures, ended]


def compile_for(sm: int) -> None:
    """Lets this process compile for GPUs of that compute capability, which needn't be here, and launch nothing."""

    def zero(*_: object) -> int:
        return 0

    target = GPUTarget("cuda", sm, 32)
    stand_in: Any = SimpleNamespace(get_current_target=lambda: target, get_current_device=zero, get_current_stream=zero)
    driver.set_active(stand_in)


def serve() -> None:
    """Compiles the jobs that stdin names, in several processes, and answers each with a line."""
    sm, processes, modules = pickle.load(sys.stdin.buffer)
    os.nice(10)  # whoever started this may load a model meanwhile
    answers = os.dup(1)
    os.dup2(2, 1)  # compilers may write
    compile_for(sm)
    for module in modules:
        importlib.import_module(module)
    jobs = pickle.load(sys.stdin.buffer)
    triton_key()  # a hash of all of Triton, remembered
    numbers, written = os.pipe()
    os.write(written, b"".join(number.to_bytes(_NUMBER, "little") for number in range(len(jobs))))
    os.close(written)
    for _ in range(processes):
        if os.fork() == 0:
            try:
                while number := os.read(numbers, _NUMBER):  # the next that no process has
                    os.write(answers, f"{_compile(*jobs[int.from_bytes(number, 'little')])}\n".encode())
            finally:
                os._exit(0)
    for _ in range(processes):
        os.wait()
    os._exit(0)  # the interpreter's own end takes half a second


def _compile(mark: str, module: str, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> str:
    """Compiles a kernel and marks it in the cache. Returns what became of it, in one line."""
    if _marked(mark):
        return _THERE
    try:
        kernel = getattr(sys.modules[module], name)
        _build_launcher(Specialization(kernel, arguments, named).compile())
        get_cache_manager(mark).put("", _MARK, binary=False)
    except Exception as error:  # noqa: BLE001  (of any compiler stage; the kernel's first use raises it again)
        return " ".join(f"{type(error).__name__}: {error}".split())[:400]
    return _COMPILED


def _build_launcher(kernel: Any) -> None:
    """Builds the C function by which Triton before 3.7 launches a kernel, where there is a CUDA driver to link to."""
    from triton.backends.nvidia import driver as nvidia

    if hasattr(nvidia, "make_launcher"):
        with suppress(Exception):
            nvidia.CudaLauncher(kernel.src, kernel.metadata)
