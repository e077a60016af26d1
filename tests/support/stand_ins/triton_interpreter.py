"""What the interpreter of Triton 3.9 gets wrong and our kernels need, put right for this process.

* Casts from float32 truncate (bf16), or lose the carry of a rounded mantissa and round subnormals down (e4m3). Torch's
  own casts, to nearest and ties to even as the hardware's are, take their place.
* `tl.dot` multiplies bf16 as the whole numbers that hold its bits, and takes e4m3 through float16.
* A comparison of scalars keeps the integer type of its operands, so that `block & scalar` isn't a mask any more.
* Each call of a device function looks through all of `tl` for what to replace: most of the interpreter's time.
"""

from __future__ import annotations

import functools
import inspect

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

# Of each Triton type, torch's, and the one that numpy holds its bits in.
_DTYPES = {
    tl.float32: (torch.float32, torch.float32),
    tl.bfloat16: (torch.bfloat16, torch.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
}
_create_splat = interpreter.InterpreterBuilder.create_splat


def apply() -> None:
    interpreter._convert_float = _rounded_to_nearest
    interpreter.InterpreterBuilder.create_splat = _splat
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter._patch_builtin = _replace_builtins


@functools.cache
def _builtins_of(namespace):
    return [(name, member) for name, member in inspect.getmembers(namespace) if tl.core.is_builtin(member)]


def _replace_builtins(namespace, builder, scope):
    for name, member in _builtins_of(namespace):
        if getattr(namespace, name) is member:  # not within a kernel that has replaced it already
            interpreter._patch_attr(namespace, name, member, builder, scope)


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
