"""A GPU that isn't there: tensors in the host's memory say that they are CUDA's, launches are counted and do nothing.

For what a layer's call costs the host, which is the same with a GPU: Python, torch's operators, launches. Kernels
aren't even compiled, so outputs are garbage. Triton's own launching, up to its driver, is the real one.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("cuda", 77)  # Triton and our own caches keep kernels for each device: no other test sees these
_STREAM = SimpleNamespace(cuda_stream=7, device=DEVICE, wait_stream=lambda _: None)
_PROPERTIES = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=227 << 10, major=9, minor=0)
_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "randn", "rand", "randint", "randperm")
_FACTORIES += ("empty_like", "zeros_like", "ones_like", "full_like")
_METHODS = ("new_empty", "new_zeros", "new_ones", "new_full")


class Launches:
    """What was launched, by name: `triton` kernels in their order, `library`: other libraries' operators."""

    def __init__(self) -> None:
        self.triton: list[str] = []
        self.library = Counter[str]()

    def clear(self) -> None:
        self.triton.clear()
        self.library.clear()

    def operator(self, name: str):
        """In place of an operator that launches a library's kernel."""

        def call(*_: object, **__: object) -> None:
            self.library[name] += 1

        return call


LAUNCHES = Launches()  # one, as prepared kernels are kept from one test to the next


class _Kernel:
    """In place of Triton's CompiledKernel."""

    function, packed_metadata = 1, b""

    def __init__(self, name: str, launches: Launches) -> None:
        self.name = name
        self.metadata = SimpleNamespace(name=name)
        self._launches = launches

    def run(self, *_: object) -> None:
        self._launches.triton.append(self.name)

    def __getitem__(self, grid: tuple[int, int, int]) -> None:
        """Loads it."""

    def launch_metadata(self, *_: object) -> None:
        raise AssertionError(f"{self.name} is launched by Triton's own launcher, which takes tens of microseconds")


@contextlib.contextmanager
def pretended_gpu() -> Iterator[Launches]:
    """Until its end, tensors are on `DEVICE`, which is an H200."""
    launches = LAUNCHES
    launches.clear()
    with pytest.MonkeyPatch.context() as patch:
        _pretend_tensors(patch)
        _pretend_cuda(patch)
        _pretend_triton(patch, launches)
        yield launches


def _pretend_tensors(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    patch.setattr(torch.Tensor, "device", property(lambda _: DEVICE), raising=False)

    def on_the_host(owner, name):
        real = getattr(owner, name)

        def make(*args, device=None, pin_memory=False, **options):
            return real(*args, **options)

        patch.setattr(owner, name, make, raising=False)

    for name in _FACTORIES:
        on_the_host(torch, name)
    for name in _METHODS:
        on_the_host(torch.Tensor, name)
    to = torch.Tensor.to

    def moved(tensor, *args, device=None, **options):
        dtypes = [arg for arg in (*args, options.get("dtype")) if isinstance(arg, torch.dtype)]
        return to(tensor, *dtypes) if dtypes else tensor

    patch.setattr(torch.Tensor, "to", moved, raising=False)


def _pretend_cuda(patch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "current_device": DEVICE.index,
        "current_stream": _STREAM,
        "get_device_capability": (9, 0),
        "get_device_name": "NVIDIA H200",
        "get_device_properties": _PROPERTIES,
        "is_available": True,
        "is_current_stream_capturing": False,
        "synchronize": None,
        "empty_cache": None,
        "mem_get_info": (1 << 40, 1 << 40),
    }.items():
        patch.setattr(torch.cuda, name, lambda *_, value=value: value)
    patch.setattr(torch._C, "_cuda_getDevice", lambda: DEVICE.index, raising=False)
    patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: _STREAM.cuda_stream, raising=False)
    for name in ("device", "stream", "device_of"):
        patch.setattr(torch.cuda, name, lambda *_: contextlib.nullcontext())


def _pretend_triton(patch: pytest.MonkeyPatch, launches: Launches) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    active = SimpleNamespace(
        get_current_device=lambda: DEVICE.index,
        get_current_stream=lambda _: _STREAM.cuda_stream,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    patch.setattr(driver, "_active", active, raising=False)
    patch.setattr(driver, "_default", active, raising=False)

    def compile_nothing(function, key, *_: object):
        kernel = _Kernel(function.__name__, launches)
        function.device_caches[DEVICE.index][0][key] = kernel
        return kernel

    patch.setattr(JITFunction, "_do_compile", compile_nothing)


class Operators(TorchDispatchMode):
    """Counts torch's operators, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counted_calls(folder: str) -> Iterator[Counter[str]]:
    """Calls of Python functions whose source lies below `folder`, by file and name."""
    found = Counter[str]()

    def see(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            found[f"{frame.f_code.co_filename.removeprefix(folder)}:{frame.f_code.co_name}"] += 1

    sys.setprofile(see)
    try:
        yield found
    finally:
        sys.setprofile(None)
