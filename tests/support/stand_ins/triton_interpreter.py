"""What the interpreter of Triton 3.9 gets wrong and our kernels need, put right for this process.

* Casts from float32 truncate (bf16), or lose the carry of a rounded mantissa and round subnormals down (e4m3). Torch's
  own casts, to nearest and ties to even as the hardware's are, take their place.
* `tl.dot` multiplies bf16 as the whole numbers that hold its bits, and takes e4m3 through float16.
* A comparison of scalars keeps the integer type of its operands, so that `block & scalar` isn't a mask any more.
* Inline PTX (`inline_ptx`) and libdevice's functions aren't there.
* Each call of a device function looks through all of `tl` for what to replace, each tensor makes objects of its shape,
  and each addition of whole numbers makes ten tensors to see that nothing overflows: most of the interpreter's time.
"""

from __future__ import annotations

import functools
import inspect
import math
from types import SimpleNamespace

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from support.stand_ins import inline_ptx

# Of each Triton type, torch's, and the one that numpy holds its bits in.
_DTYPES = {
    tl.float32: (torch.float32, torch.float32),
    tl.bfloat16: (torch.bfloat16, torch.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
}
_WIDE = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_create_splat, _broadcast = interpreter.InterpreterBuilder.create_splat, TritonSemantic.broadcast_impl_value
_get_np_dtype, _patch_lang = interpreter._get_np_dtype, interpreter._patch_lang
# Kernels name `tl`, Triton's own device functions `core`.
_WHOLE_LANGUAGE = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
_np_dtypes: dict[str, np.dtype] = {}


def apply() -> None:
    interpreter._convert_float = _rounded_to_nearest
    interpreter.InterpreterBuilder.create_splat = _splat
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter._patch_builtin = _replace_builtins
    interpreter._patch_lang = lambda kernel: _patch_lang(_WHOLE_LANGUAGE)
    interpreter._get_np_dtype = _np_dtype
    interpreter.InterpretedFunction.__call__ = _call_within_a_kernel
    tl.block_type.__init__, tl.tensor.__init__ = _init_block_type, _init_tensor
    TritonSemantic.broadcast_impl_value = _broadcast_to_each_other
    TritonSemantic.binary_op_sanitize_overflow_impl = _refuse_overflow
    tl.inline_asm_elementwise = _inline_asm
    libdevice.exp, libdevice.log1p = _in_float64(np.exp), _in_float64(np.log1p)


@functools.cache
def _builtins_of(namespace):
    return [(name, member) for name, member in inspect.getmembers(namespace) if tl.core.is_builtin(member)]


def _replace_builtins(namespace, builder, scope):
    for name, member in _builtins_of(namespace):
        if getattr(namespace, name) is member:  # not within a kernel that has replaced it already
            interpreter._patch_attr(namespace, name, member, builder, scope)


def _call_within_a_kernel(function, *args, **kwargs):
    return function.rewrite()(*args, **kwargs)


def _np_dtype(dtype):
    found = _np_dtypes.get(dtype.name)
    if found is None:
        found = _np_dtypes[dtype.name] = _get_np_dtype(dtype)
    return found


@functools.cache
def _dimensions(sizes):
    tl.core.validate_block_shape(sizes)
    return tl.tuple(sizes), tl.tuple([tl.constexpr(each) for each in sizes]), tl.constexpr(math.prod(sizes))


def _init_block_type(block, element, shape):
    block.sizes = tuple(each.value if isinstance(each, tl.constexpr) else each for each in shape)
    block.element_ty, block.numel = element, math.prod(block.sizes)
    block.shape, block.name = _dimensions(block.sizes)[0], f"<{block.sizes}, {element}>"


def _init_tensor(tensor, handle, type):
    tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
    _, tensor.shape, tensor.numel = _dimensions(type.sizes if type.is_block() else ())


def _broadcast_to_each_other(semantic, left, right):
    if left.type.is_block() and right.type.is_block() and left.type.sizes == right.type.sizes:
        return left, right
    return _broadcast(semantic, left, right)


def _refuse_overflow(semantic, left, right, operation):
    if left.dtype.int_bitwidth < 64:
        found = _WIDE[operation.__name__](left.handle.data, right.handle.data, dtype=np.int64)
        low, high = left.dtype.get_int_min_value(), left.dtype.get_int_max_value()
        if found.size and not low <= found.min() <= found.max() <= high:
            raise OverflowError(f"{left.dtype}: {operation.__name__}")


def _rounded_to_nearest(values, source, target, rounding_mode):
    read, (write, bits) = _DTYPES[source][0], _DTYPES[target]
    return torch.from_numpy(np.array(values)).view(read).to(write).view(bits).numpy()


def _splat(builder, result_type, value):
    if value.data.dtype == np.bool_:
        value = interpreter.TensorHandle(value.data, tl.int1)
    return _create_splat(builder, result_type, value)


def _dot(builder, a, b, d, input_precision, max_num_imprecise_acc):
    left, right = (_in_float32(operand) for operand in (a, b))
    return interpreter.TensorHandle(np.matmul(left, right) + d.data, d.dtype.scalar)


def _in_float32(operand):
    found = _DTYPES.get(operand.dtype.scalar)
    if found is None:
        return operand.data
    return torch.from_numpy(np.ascontiguousarray(operand.data)).view(found[0]).float().numpy()


def _inline_asm(asm, constraints, args, dtype, is_pure, pack):
    text, *given = (each.value if isinstance(each, tl.constexpr) else each for each in (asm, *args))
    arrays = [each.handle.data if isinstance(each, tl.tensor) else np.uint32(each) for each in given]
    return _tensor(inline_ptx.execute(text, arrays).view(_np_dtype(dtype)), dtype)


def _in_float64(function):
    return lambda x: _tensor(function(x.handle.data.astype(np.float64)).astype(np.float32), tl.float32)


def _tensor(values, element):
    of = tl.block_type(element, list(values.shape)) if values.shape else element
    return tl.tensor(interpreter.TensorHandle(values, element), of)
