"""As much of Gluon as `eprt.experts.grouped.gemm_gluon` speaks, on a CPU: Triton's interpreter has none of it.

Tensors are those of Triton's own interpreter, and device functions of `triton.language` run in it; layouts are ignored.
Shared memory, barriers, the copy engine and asynchronous products are `gluon_order`'s: a product computes with what its
operands hold when it is waited for. `apply()` comes before anything imports Gluon.
"""

from __future__ import annotations

import inspect
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import mangle_type

from eprt.experts import sort_by_expert_triton
from support.stand_ins.gluon_order import GRANULE, Barrier, Buffer, Job, Machine, Write

# What numpy holds torch's types in.
_BITS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}
_seeds = itertools.count()  # another order of turns for each launch
_machines: list[Machine] = []  # that of the launch under way, if any


class Jit:
    """A function in Gluon: called by another one, or launched with `[grid]`. `fn` may be replaced."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.arg_names = list(inspect.signature(fn).parameters)

    def __call__(self, *args: Any) -> Any:
        return self.fn(*args)

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *args: self._launch(grid, args)

    def _launch(self, grid: tuple[int, int, int], args: tuple[Any, ...]) -> None:
        patched = interpreter._patch_lang(_number)
        _machines.append(Machine(next(_seeds)))
        try:
            given = [interpreter._implicit_cvt(arg) for arg in args]
            interpreter.interpreter_builder.set_grid_dim(*grid)
            for program in range(grid[0]):
                interpreter.interpreter_builder.set_grid_idx(program, 0, 0)
                self.fn(*given)
            _at_work().run()
        finally:
            _machines.pop()
            patched.restore()


def _number(value: Any) -> int:
    return int(value.handle.data.squeeze()) if isinstance(value, tl.tensor) else int(value)


def _tensor(data: np.ndarray, dtype: Any) -> Any:
    return tl.tensor(interpreter.TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)))


def _at_work() -> Machine:
    return _machines[-1]


@dataclass(frozen=True)
class Memory:
    """A contiguous part of an allocation, from element `start` on; `order` as `permute` got it."""

    bytes: np.ndarray
    buffer: Buffer
    dtype: Any
    shape: tuple[int, ...]
    start: int = 0
    order: tuple[int, ...] | None = None

    @property
    def _itemsize(self) -> int:
        return interpreter._get_np_dtype(self.dtype).itemsize

    @property
    def extent(self) -> tuple[Buffer, int, int]:
        """(buffer, first byte, bytes)."""
        return self.buffer, self.start * self._itemsize, math.prod(self.shape) * self._itemsize

    def _array(self) -> np.ndarray:
        array = self.bytes.view(interpreter._get_np_dtype(self.dtype))
        array = array[self.start : self.start + math.prod(self.shape)].reshape(self.shape)
        return array if self.order is None else array.transpose(self.order)

    def index(self, index: Any) -> Memory:
        at, shape = _number(index), self.shape[1:]
        if not 0 <= at < self.shape[0]:
            raise IndexError(f"{at} of {self.shape[0]}")
        return replace(self, shape=shape, start=self.start + at * math.prod(shape))

    def slice(self, start: int, length: int, dim: int) -> Memory:
        if dim != 0 or start + length > self.shape[0]:
            raise NotImplementedError("a slice of the first dimension alone")
        begin = self.start + start * math.prod(self.shape[1:])
        return replace(self, shape=(length, *self.shape[1:]), start=begin)

    def permute(self, order: tuple[int, ...]) -> Memory:
        return replace(self, order=order)

    def reinterpret(self, dtype: Any, shape: Sequence[int], layout: object) -> Memory:
        found = replace(self, dtype=dtype, shape=tuple(shape))
        if found.extent[2] > self.extent[2]:
            raise ValueError("more than there is")
        return found

    def read(self) -> np.ndarray:
        """By the role at work."""
        self.buffer.on_read(_at_work().current, *self.extent[1:])
        return self._array().copy()

    def load(self, layout: object) -> Any:
        return _tensor(self.read(), self.dtype)

    def store(self, value: Any) -> None:
        role = _at_work().current
        self.buffer.on_write(role, *self.extent[1:], Write(role, role.clock[role]))
        self.fill(value.handle.data)

    def fill(self, data: np.ndarray) -> None:
        self._array()[...] = data


def _allocate(dtype: Any, shape: Sequence[int], layout: object) -> Memory:
    itemsize = interpreter._get_np_dtype(dtype).itemsize
    size = math.prod(shape) * itemsize
    buffer = Buffer(f"{dtype}{list(shape)}", min(GRANULE, math.prod(shape[1:]) * itemsize))
    return Memory(np.full(size, 0xFF, dtype=np.uint8), buffer, dtype, tuple(shape))  # 0xFF: NaN in bf16 and float32


def _init(memory: Memory, count: int) -> None:
    memory.buffer.barriers[memory.start] = Barrier(count, count)


def _barrier_of(memory: Memory) -> Barrier:
    return memory.buffer.barriers[memory.start]


def _wait(memory: Memory, parity: Any) -> None:
    _at_work().wait(_barrier_of(memory), _number(parity), f"{memory.buffer.name}[{memory.start}]")


def _expect(memory: Memory, bytes: int) -> None:
    _at_work().arrive(_barrier_of(memory), bytes)


def _arrive(memory: Memory) -> None:
    _at_work().arrive(_barrier_of(memory))


class Descriptor:
    """Blocks of a tensor for the copy engine; zeros past its end."""

    def __init__(self, tensor: torch.Tensor, block_shape: list[int]) -> None:
        self.tensor, self.block_shape = tensor, block_shape

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, block_shape: list[int], layout: object) -> Descriptor:
        return cls(tensor, list(block_shape))

    def block(self, at: list[int]) -> np.ndarray:
        found = torch.zeros(self.block_shape, dtype=self.tensor.dtype)
        part = self.tensor[tuple(slice(a, a + n) for a, n in zip(at, self.block_shape, strict=True))]
        found[tuple(slice(n) for n in part.shape)] = part
        return found.view(_BITS.get(found.dtype, found.dtype)).numpy()


def _copy_tile(descriptor: Descriptor, at: list[Any], barrier: Memory, target: Memory) -> None:
    block = descriptor.block([_number(each) for each in at])
    _at_work().copy_tile(_barrier_of(barrier), target.extent, block.nbytes, lambda: target.fill(block))


def _copy_async(target: Memory, pointers: Any, mask: Any = None) -> None:
    bits = interpreter._get_np_dtype(target.dtype)
    data = tl.load(pointers).handle.data if mask is None or _number(mask) else np.zeros(target.shape, bits)
    _at_work().copy_async(target.extent, lambda: target.fill(data))


def _arrive_after_copies(barrier: Memory, increment_count: bool) -> None:
    if increment_count:
        raise NotImplementedError("arrivals that the barrier was not made for")
    _at_work().arrive_after_copies(_barrier_of(barrier))


@dataclass(frozen=True)
class Product:
    """Begun: left x right, added to `total` or, without `use_acc`, in place of it."""

    left: Any
    right: Memory
    total: Any
    use_acc: bool

    @property
    def shape(self) -> Any:
        return self.total.shape

    def done(self) -> Any:
        """Reads what the operands hold by now."""
        total = self.total.done() if isinstance(self.total, Product) else self.total
        left = self.left.read() if isinstance(self.left, Memory) else self.left.handle.data
        with np.errstate(all="ignore"):  # rows past an expert's end are garbage, and are not stored
            value = np.matmul(_in_float32(left), _in_float32(self.right.read()))
            return _tensor(total.handle.data + value if self.use_acc else value, tl.float32)


def _in_float32(bits: np.ndarray) -> np.ndarray:
    """Of bf16, and of e4m3."""
    if bits.dtype == np.uint8:
        return torch.from_numpy(np.ascontiguousarray(bits)).view(torch.float8_e4m3fn).float().numpy()
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _begin_product(left: Any, right: Memory, total: Any, is_async: bool, use_acc: bool = True) -> Product:
    for operand in (left, right):
        if isinstance(operand, Memory):
            operand.read()
    _at_work().current.pause()
    return Product(left, right, total, use_acc)


def _await_products(outstanding: int, given: list[Any]) -> Any:
    if outstanding:
        raise NotImplementedError("some products left under way")
    _at_work().current.pause()
    found = [each.done() if isinstance(each, Product) else each for each in given]
    return found[0] if len(found) == 1 else tuple(found)


def _specialize(parts: list[tuple[Jit, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
    """The last thing that a program does: its roles start when all programs are here."""
    program = interpreter.interpreter_builder.grid_idx
    enter = partial(interpreter.interpreter_builder.set_grid_idx, *program)
    for number, ((job, args), count) in enumerate(zip(parts, [4, *warps], strict=True)):
        name = f"{job.fn.__name__} {number} of program {program[0]}"
        _at_work().jobs.append(Job(name, count, partial(job, *args), enter))


class _Layout:
    """Any layout."""

    def __init__(self, *given: object) -> None:
        self.value = self


def _where(condition: Any, one: Any, other: Any) -> Any:
    if isinstance(condition, bool):
        return one if condition else other
    return tl.where(condition, one, other)


def _without_layout(name: str, count: int) -> Callable[..., Any]:
    """`tl`'s of this name, which is looked up when it runs, with the first `count` arguments."""
    return lambda *args: getattr(tl, name)(*args[:count])


_LANGUAGE: dict[str, Any] = {
    "constexpr": lambda value: value,
    "to_tensor": lambda value: value,
    "static_range": range,
    "shared_memory_descriptor": Memory,
    "allocate_shared_memory": _allocate,
    "warp_specialize": _specialize,
    "num_warps": lambda: _at_work().current.warps,
    "barrier": lambda: None,
    "convert_layout": lambda value, layout, assert_trivial=False: value,
    "where": _where,
    "arange": _without_layout("arange", 2),
    "zeros": _without_layout("zeros", 2),
    "full": lambda shape, value, dtype, layout: tl.full(shape, _number(value), dtype),
}
_LAYOUTS = (
    "BlockedLayout", "SliceLayout", "DotOperandLayout", "DistributedLinearLayout", "NVMMADistributedLayout",
    "NVMMASharedLayout", "SwizzledSharedLayout",
)  # fmt: skip
_AS_IN_TRITON = (
    "load", "store", "max", "minimum", "maximum", "join", "split", "reshape", "permute", "atomic_add", "num_programs",
    "expand_dims", "program_id", "static_assert",
)  # fmt: skip
_TYPES = "int32", "int64", "uint32", "float32", "bfloat16", "float8e4nv"


def _through(name: str) -> Callable[..., Any]:
    return lambda *args, **options: getattr(tl, name)(*args, **options)


def apply() -> None:
    """Gluon's modules are these from now on, and kernels needn't wait for the one before."""
    mangle_type(0)  # Triton looks for Gluon's own descriptors once
    language = {**_LANGUAGE, **dict.fromkeys(_LAYOUTS, _Layout), **{name: getattr(tl, name) for name in _TYPES}}
    language |= {name: _through(name) for name in _AS_IN_TRITON}
    mbarrier = SimpleNamespace(MBarrierLayout=_Layout, init=_init, wait=_wait, expect=_expect, arrive=_arrive)
    copies = SimpleNamespace(async_load=_copy_async, mbarrier_arrive=_arrive_after_copies)
    hopper = {
        "mbarrier": mbarrier,
        "tma": SimpleNamespace(async_load=_copy_tile),
        "fence_async_shared": lambda: None,
        "warpgroup_mma": _begin_product,
        "warpgroup_mma_wait": _await_products,
    }
    gluon = "triton.experimental.gluon"
    modules: dict[str, dict[str, Any]] = {
        gluon: {"jit": Jit, "constexpr_function": Jit},
        f"{gluon}.language": language,
        f"{gluon}.language.nvidia": {},
        f"{gluon}.language.nvidia.ampere": {"async_copy": copies},
        f"{gluon}.language.nvidia.hopper": hopper,
        f"{gluon}.nvidia": {},
        f"{gluon}.nvidia.hopper": {"TensorDescriptor": Descriptor},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        setattr(import_module(parent), last, module)
    tl.block_type.layout = None
    sort_by_expert_triton.gdc_wait = sort_by_expert_triton.gdc_launch_dependents = lambda: None
