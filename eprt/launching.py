"""Launches Triton kernels that were compiled and looked up once. Imported only where kernels run.

Triton's own launcher examines every argument to find the compiled kernel that fits: 20 to 60 us of host time per
launch. Our kernels' specializations are known when a layer is built, so each is looked up once and a call only
launches.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver

from eprt.support import Device

INTERPRETED = bool(knobs.runtime.interpret)
INT32 = 1 << 31  # the first number that 32 bits have no room for
_TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
_ALIGNMENT = 16  # bytes, and the multiple that Triton specialises integers for


@dataclass(frozen=True)
class Specialization:
    """Names what Triton compiles one machine code from.

    Attributes:
        kernel: Triton's or Gluon's function.
        arguments: see `CachedKernel`.
        named: the kernel's constants and Triton's launch options.
        load: compiles and loads the CachedKernel that was recorded.
    """

    kernel: Any
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    load: Callable[[], object] = field(default=lambda: None, compare=False, repr=False)

    def compile(self) -> Any:
        """Returns Triton's compiled kernel, from its cache on disk if it is there."""
        name_callees_first(self.kernel)
        with shared_cache():
            return self.kernel.warmup(*self.arguments, **self.named, grid=(1,))


_recorded: list[Specialization] | None = None


@contextmanager
def recording() -> Iterator[list[Specialization]]:
    """Collects what would be compiled. Within it nothing is compiled, and calls of CachedKernels launch nothing; one
    that was made within it is compiled by its first call outside."""
    global _recorded
    outer, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = outer


class CachedKernel:
    """A kernel that is compiled once, for one device and one kind of arguments; a call only launches it.

    Args:
        arguments: what each of the kernel's first arguments is specialized for: a tensor's dtype, None, an int of the
            same class (`like`), or the value itself (tensor descriptors, tuples of addresses). Tensors are contiguous,
            start at a multiple of 16 bytes unless the kernel says otherwise, and lie on that device. A tensor of
            another dtype is read as if it had this one. None of their memory is kept.
        constants: the kernel's remaining arguments by name, without PDL.
        pdl: use programmatic dependent launch where the GPU has it (sm90): the kernel is set up while the previous
            one still runs, and must wait for it before it touches its results. A constant PDL says so to the kernel.
    """

    def __init__(
        self,
        kernel: Any,
        device: torch.device,
        arguments: tuple[Any, ...],
        constants: dict[str, Any],
        *,
        pdl: bool = False,
        **options: Any,
    ) -> None:
        pdl = pdl and Device.of(device).sm >= 90
        # enable_fp_fusion is Triton's default until 3.9.
        options = {"enable_fp_fusion": True, **options, **({"launch_pdl": True} if pdl else {})}
        if "PDL" in kernel.arg_names:
            constants = {**constants, "PDL": pdl}
        arguments = tuple(map(_without_memory, arguments))
        self._constants = tuple(constants[name] for name in kernel.arg_names if name in constants)
        self._kernel, self._dtypes, self._where = kernel, arguments, device
        self._run: Callable[..., None] | None = None
        self._specialization = Specialization(kernel, arguments, {**constants, **options}, self._load)
        if _recorded is not None:
            _recorded.append(self._specialization)
        elif not INTERPRETED:
            self._load()

    def load(self) -> None:
        """Loads the kernel unless it is, for a call that may come at any time."""
        if _recorded is None and not INTERPRETED and self._run is None:
            self._load()

    def _load(self) -> Callable[..., None]:
        active: Any = driver.active
        with torch.cuda.device(self._where), shared_cache():
            self._kernel = self._specialization.compile()
            self._kernel[(1, 1, 1)]  # loads it, and before Triton 3.7 builds what launches it unless that is cached
            self._device: int = active.get_current_device()
        # What CompiledKernel's own launcher does, without what it finds anew each time.
        self._function, self._metadata = self._kernel.function, self._kernel.packed_metadata
        self._current_device: Callable[[], int] = torch._C._cuda_getDevice
        self._stream: Callable[[int], int] = active.get_current_stream
        self._run = self._kernel.run
        return self._kernel.run

    def __call__(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        if _recorded is not None:
            return
        if INTERPRETED:
            self._kernel[grid](*map(_as_dtype, arguments, self._dtypes), *self._constants)
            return
        run = self._run or self._load()
        device, runtime = self._device, knobs.runtime
        if self._current_device() != device:
            with torch.cuda.device(device):
                self(grid, *arguments)
            return
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):  # a profiler wants to hear of launches
            self._kernel[grid](*arguments, *self._constants)
            return
        x, y, z = grid
        run(
            x, y, z, self._stream(device), self._function, self._metadata, None, None, None, *arguments,
            *self._constants,
        )  # fmt: skip


def _without_memory(argument: Any) -> Any:
    """Returns a tensor descriptor of the same blocks on no memory, which a kernel would keep from being freed as long
    as itself; other arguments as they are. Nothing is compiled for the interpreter."""
    if INTERPRETED or not hasattr(argument, "block_shape"):
        return argument
    block = list(argument.block_shape)
    base = torch.empty(block, dtype=argument.base.dtype, device="meta")
    return replace(argument, base=base, shape=block, strides=list(base.stride()))


def name_callees_first(kernel: Any, named: set[int] | None = None) -> None:
    """Computes the cache keys of all functions that a kernel calls, then the kernel's own.

    Before Triton 3.9 a function's cache key covers the globals of its callees only if these have a key already. The
    order in which a process makes kernels would then decide whether it finds what another process compiled.
    """
    if _TRITON >= (3, 9):
        return
    named = {id(kernel)} if named is None else named
    names = kernel.fn.__code__.co_names
    found = [kernel.__globals__.get(name) for name in names]
    found += [getattr(each, name, None) for each in found if isinstance(each, ModuleType) for name in names]
    for each in found:
        if hasattr(type(each), "cache_key") and id(each) not in named:  # on itself it would be computed
            named.add(id(each))
            name_callees_first(each, named)
    _ = kernel.cache_key


@contextmanager
def shared_cache() -> Iterator[None]:
    """Compiles into the cache that this user's other processes read, under the keys that they use.

    Once torch.compile has made a kernel in a process, three variables are Inductor's. TRITON_CACHE_DIR names a folder
    for one GPU only: each rank would compile what the others compile. TRITON_PTXAS_PATH and TRITON_LIBDEVICE_PATH name
    tools that are part of every kernel's key: nothing that was compiled ahead would be found. So is
    TRITON_PTXAS_BLACKWELL_PATH, which FlashInfer sets (Triton 3.9 takes it from sm90 on). The user's stay.
    """
    chosen = {name: os.environ[name] for name in _LIBRARIES if name in os.environ}
    dropped = {name: value for name, value in chosen.items() if _LIBRARIES[name](Path(value))}
    if not dropped:
        yield
        return
    with knobs.nvidia.scope():  # Inductor sets the knob as well as the variable
        for name in dropped:
            del os.environ[name]
        if "TRITON_LIBDEVICE_PATH" in dropped:
            del knobs.nvidia.libdevice_path
        _forget_ptxas()
        try:
            yield
        finally:
            os.environ.update(dropped)
            _forget_ptxas()


def _forget_ptxas() -> None:
    """Lets Triton ask for ptxas's version again: it remembers the first answer, of whichever ptxas was set then."""
    from triton.backends.nvidia import compiler

    clear: Callable[[], None] | None = getattr(getattr(compiler, "get_ptxas_version", None), "cache_clear", None)
    if clear is not None:
        clear()


def _inductor_chose(folder: Path) -> bool:
    if "triton" not in folder.parts:
        return False  # asking Inductor costs seconds where nothing else has imported it
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return folder.is_relative_to(Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir(), "triton"))


_LIBRARIES: dict[str, Callable[[Path], bool]] = {  # whether a variable's value is what a library sets it to
    "TRITON_CACHE_DIR": _inductor_chose,
    "TRITON_PTXAS_PATH": lambda path: path == Path(torch.__file__).parent / "bin" / "ptxas",
    # Children inherit it, so that it doesn't matter whether FlashInfer is imported here. Triton's own is newer.
    "TRITON_PTXAS_BLACKWELL_PATH": lambda path: _TRITON >= (3, 9) and str(path) == shutil.which("ptxas"),
    "TRITON_LIBDEVICE_PATH": lambda path: path.parts[-3:] == ("nvvm", "libdevice", "libdevice.10.bc"),
}


def _as_dtype(argument: Any, dtype: Any) -> Any:
    """Returns a tensor viewed as `dtype`, since the interpreter would take its own."""
    differs = isinstance(argument, torch.Tensor) and isinstance(dtype, torch.dtype) and argument.dtype != dtype
    return argument.view(dtype) if differs else argument


def like(number: int) -> int:
    """Returns a representative of Triton's specialization class of an integer argument.

    The classes are: equal to 1, divisible by 16, and neither; 64-bit values have their own of the last two.
    """
    if number == 1:
        return 1
    return (0 if -INT32 <= number < INT32 else INT32 << 1) + (_ALIGNMENT if number % _ALIGNMENT == 0 else 2)


def starts_aligned(*tensors: torch.Tensor) -> bool:
    """Tells whether all tensors start at a multiple of 16 bytes, as a CachedKernel expects."""
    together = 0
    for tensor in tensors:
        together |= tensor.data_ptr()
    return together % _ALIGNMENT == 0
