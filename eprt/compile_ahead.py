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
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager
from triton.tools.tensor_descriptor import TensorDescriptor

from eprt.launching import INTERPRETED, Specialization, name_callees_first, recording, shared_cache
from eprt.support import Device

logger = logging.getLogger(__name__)
PROCESSES = "EPRT_COMPILE_PROCESSES"  # how many at most; 0: each kernel is compiled where it is first needed
FEWEST = 4  # kernels for which starting processes pays: each imports torch first
MOST_PROCESSES = 32
_MARK = "eprt-compiled"
_WORKER = "from eprt.compile_ahead import serve; serve()"


@dataclass(frozen=True)
class _Blocks:
    """What a tensor descriptor is to Triton's compiler."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: Any = None  # Gluon's

    @classmethod
    def of(cls, argument: Any) -> Any:
        """Returns what stands for a descriptor; other arguments as they are."""
        if isinstance(argument, TensorDescriptor):
            return cls(argument.base.dtype, tuple(argument.block_shape))
        if isinstance(argument, GluonDescriptor):
            return cls(argument.base.dtype, tuple(argument.block_shape), argument.layout)
        return argument

    def descriptor(self) -> Any:
        base = torch.empty(self.shape, dtype=self.dtype, device="meta")
        if self.layout is None:
            return TensorDescriptor.from_tensor(base, list(self.shape))
        return GluonDescriptor.from_tensor(base, list(self.shape), self.layout)


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
    compile_all(found, Device.of(device), processes, begin=begin)
    warmup()


def _processes(share: float) -> int:
    asked = os.environ.get(PROCESSES, "")
    most = int(asked) if asked.isdigit() else MOST_PROCESSES
    return min(most, int(len(os.sched_getaffinity(0)) * share))


def compile_all(
    found: list[Specialization], target: Device, processes: int, *, begin: float = 0.0, fewest: int = FEWEST
) -> int:
    """Compiles what isn't in the cache yet; returns how many kernels that were. Kernels that can't be compiled are left
    to their first use, which raises.

    Args:
        begin: the part of the kernels that comes last, 0 to 1.  fewest: kernels for which processes are started.
    """
    start = time.monotonic()
    with shared_cache():
        jobs = {mark: spec for spec in found if (mark := _mark(spec, target))}
        todo = [mark for mark in sorted(jobs, key=lambda mark: _cost(jobs[mark]), reverse=True) if not _marked(mark)]
        if len(todo) < fewest:
            return 0
        processes = min(processes, len(todo))
        logger.info("eprt: compiling %d kernels in %d processes", len(todo), processes)
        first = int(len(todo) * begin)
        queue = [(mark, _pickled(jobs[mark])) for mark in todo[first:] + todo[:first]]
        with ThreadPoolExecutor(processes) as threads:
            done = sum(threads.map(_drain, [queue] * processes, [target] * processes))
    logger.info("eprt: compiled %d kernels in %.1f s", done, time.monotonic() - start)
    return done


# ---- jobs ------------------------------------------------------------------------------------------------------------


def _pickled(spec: Specialization) -> bytes:
    """Returns a specialization as another process can read it."""
    function = spec.kernel.fn
    return pickle.dumps((function.__module__, function.__name__, tuple(map(_Blocks.of, spec.arguments)), spec.named))


def _specialization(job: bytes) -> Specialization:
    module, name, arguments, named = pickle.loads(job)
    kernel = getattr(importlib.import_module(module), name)
    return Specialization(kernel, tuple(a.descriptor() if isinstance(a, _Blocks) else a for a in arguments), named)


def _cost(spec: Specialization) -> tuple[bool, int]:
    """Orders jobs by how long they take: warp-specialized kernels, then those with many constants."""
    return spec.kernel.is_gluon(), len(str(spec.named))


def _mark(spec: Specialization, target: Device) -> str:
    """Returns the key under which the cache remembers that a kernel was compiled, by the same version of everything;
    empty for one that another process can't import."""
    function = spec.kernel.fn
    module = sys.modules.get(function.__module__)
    if function.__module__ == "__main__" or getattr(module, function.__name__, None) is not spec.kernel:
        return ""
    name_callees_first(spec.kernel)
    arguments = tuple(map(_Blocks.of, spec.arguments))
    text = f"{triton.__version__} {spec.kernel.cache_key} {target.sm} {arguments} {spec.named}"
    return hashlib.sha256(text.encode()).hexdigest()


def _marked(mark: str) -> bool:
    return get_cache_manager(mark).get_file(_MARK) is not None


# ---- processes -------------------------------------------------------------------------------------------------------


def _drain(queue: list[tuple[str, bytes]], target: Device) -> int:
    """Has a process of its own compile jobs of the queue until none is left. Returns how many it compiled."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command, pipe, done = [sys.executable, "-c", _WORKER, str(target.sm)], subprocess.PIPE, 0
    worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment)
    requests, answers = cast("IO[bytes]", worker.stdin), cast("IO[bytes]", worker.stdout)
    with worker, suppress(BrokenPipeError, EOFError, IndexError):  # it died, or no job is left
        while True:
            mark, job = queue.pop(0)
            if _marked(mark):
                continue
            pickle.dump(job, requests)
            requests.flush()
            if failure := pickle.load(answers):
                logger.debug("eprt: a kernel wasn't compiled ahead: %s", failure)
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
    """Compiles the jobs that come on stdin for the target that argv names, and answers each on stdout with an error's
    text, empty if there was none."""
    requests, answers, sys.stdout = sys.stdin.buffer, sys.stdout.buffer, sys.stderr
    compile_for(int(sys.argv[1]))
    while True:
        try:
            job = pickle.load(requests)
        except EOFError:
            return
        answer = ""
        try:
            _build_launcher(_specialization(job).compile())
        except Exception as error:  # noqa: BLE001  (of any compiler stage; the kernel's first use raises it again)
            answer = f"{type(error).__name__}: {error}"
        pickle.dump(answer, answers)
        answers.flush()


def _build_launcher(kernel: Any) -> None:
    """Builds the C function by which Triton before 3.7 launches a kernel, where there is a CUDA driver to link to."""
    from triton.backends.nvidia import driver as nvidia

    if hasattr(nvidia, "make_launcher"):
        with suppress(Exception):
            nvidia.CudaLauncher(kernel.src, kernel.metadata)
