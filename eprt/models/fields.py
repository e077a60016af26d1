"""Says in which tensors of a checkpoint a number format's fields are, how each is cut, and how its values are checked.

`FORMATS` has the names of ModelOpt, DeepSeek and gpt-oss; `stored_as` knows those of the other packers, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from eprt.config import WeightFormat
from eprt.models.packed import (
    as_float32,
    codes_of_rows,
    codes_of_words,
    columns_in_order,
    int4_scale,
    of_this_shape,
    reciprocal,
    symmetric_zeros,
    unused_scale,
    zeros_of_rows,
)
from eprt.models.scales import E2M1_BYTES, E4M3_BYTES, E4M3_FACTOR, NVFP4_FACTOR, activation_scale, positive_scale
from eprt.models.schemes import Scheme
from eprt.quant.packing import AWQ_ORDER, IN_ORDER
from eprt.weights import (
    FP8_BLOCK,
    MX_BLOCK,
    NVFP4_BLOCK,
    Dense,
    Fp8Block,
    Fp8Channel,
    Fp8Tensor,
    Int4,
    Matrix,
    Mxfp4,
    Mxfp8,
    Nvfp4,
)

Part = Literal["gate", "up", "down"]
WHOLE_ROW = 0  # as a field's columns
_E4M3, _E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


@dataclass(frozen=True)
class Field:
    """One tensor of a matrix type.

    Attributes:
        name: the matrix type's field.
        suffixes: the checkpoint's names for it, after the module's name.
        dtypes: those it may be stored in.
        rows, cols: how much of the matrix one entry covers; rows 0 means one number for the whole part, cols 0 a whole
            row.
        accept: checks values and brings them to the canonical dtype.
        optional: may be absent from all experts (never from some).
        transposed: the tensor is [in, out].
    """

    name: str
    suffixes: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    rows: int = 1
    cols: int = 1
    accept: Callable[[torch.Tensor, str], torch.Tensor] = lambda values, where: values
    optional: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class Claim:
    """A tensor beside a matrix, which isn't kept: it says something that has to be true.

    Attributes:
        shape: (rows, cols) of the whole matrix -> the tensor's.
        require: (values, where, (rows, cols)); raises CheckpointError.
        optional: may be absent.
    """

    suffix: str
    dtypes: tuple[torch.dtype, ...]
    shape: Callable[[int, int], tuple[int, ...]]
    require: Callable[[torch.Tensor, str, tuple[int, int]], None]
    optional: bool = False


@dataclass(frozen=True)
class Stored:
    """The tensors of a matrix in files: the fields of its type, and what else is read beside them.

    Attributes:
        order: suffix of the tensor that says each column's group, where columns may be out of order (`models.columns`).
        group: columns of a group there; 0 is the whole row.
    """

    kind: type[Matrix]
    fields: tuple[Field, ...]
    claims: tuple[Claim, ...] = ()
    order: str = ""
    group: int = 0


_BYTES = (torch.uint8, torch.int8)
_F32 = (torch.float32,)
_CODES = Field("codes", ("weight",), _BYTES, cols=2, accept=lambda codes, where: codes.view(torch.uint8))
_FP8_DATA = Field("data", ("weight",), (_E4M3,))
_INPUT_SCALE = Field("input_scale", ("input_scale",), _F32, rows=0, accept=activation_scale, optional=True)
# `weight_scale_inv` (DeepSeek-V3) and `scale` (DeepSeek-V4) are factors, whatever the first one's name says.
FORMATS: dict[WeightFormat, Stored] = {
    "bf16": Stored(Dense, (Field("data", ("weight",), (torch.bfloat16,)),)),
    "f32": Stored(Dense, (Field("data", ("weight",), _F32),)),
    "mxfp4": Stored(
        Mxfp4,
        (
            _CODES,
            Field(
                "scales", ("scale", "weight_scale_inv"), (torch.uint8, _E8M0, *_F32), cols=MX_BLOCK, accept=E2M1_BYTES
            ),
        ),
    ),
    "nvfp4": Stored(
        Nvfp4,
        (
            _CODES,
            Field("scales", ("weight_scale",), (_E4M3,), cols=NVFP4_BLOCK, accept=positive_scale),
            Field("global_scale", ("weight_scale_2",), _F32, rows=0, accept=NVFP4_FACTOR),
            _INPUT_SCALE,
        ),
    ),
    "fp8_tensor": Stored(
        Fp8Tensor,
        (_FP8_DATA, Field("scale", ("weight_scale",), _F32, rows=0, accept=E4M3_FACTOR), _INPUT_SCALE),
    ),
    "fp8_block": Stored(
        Fp8Block,
        (
            _FP8_DATA,
            Field(
                "scale",
                ("weight_scale_inv", "scale"),
                (*_F32, torch.bfloat16, _E8M0),
                FP8_BLOCK,
                FP8_BLOCK,
                E4M3_FACTOR,
            ),
        ),
    ),
    "mxfp8": Stored(
        Mxfp8,
        (
            _FP8_DATA,
            Field(
                "scales",
                ("weight_scale",),
                (torch.uint8, _E8M0),
                cols=MX_BLOCK,
                accept=E4M3_BYTES,
            ),
        ),
    ),
}


def stored_as(scheme: Scheme) -> Stored:
    """Returns the tensors of a scheme's matrices."""
    match scheme.packer:
        case "compressed-tensors":
            return _pack_quantized(scheme) if scheme.format == "int4" else _COMPRESSED[scheme.format]
        case "gptq" | "awq":
            return _words(scheme)
        case _:
            return FORMATS[scheme.format]


_INT32 = (torch.int32,)
_FLOATS = (*_F32, torch.bfloat16, torch.float16)
_STATIC_INPUT = Claim("input_scale", _FLOATS, lambda rows, cols: (1,), unused_scale, optional=True)
_COMPRESSED: dict[WeightFormat, Stored] = {
    **FORMATS,
    "nvfp4": Stored(
        Nvfp4,
        (
            Field("codes", ("weight_packed",), _BYTES, cols=2, accept=_CODES.accept),
            Field("scales", ("weight_scale",), (_E4M3,), cols=NVFP4_BLOCK, accept=positive_scale),
            Field("global_scale", ("weight_global_scale",), _F32, rows=0, accept=reciprocal(NVFP4_FACTOR)),
            Field("input_scale", ("input_global_scale",), _F32, 0, 1, reciprocal(activation_scale), optional=True),
        ),
    ),
    "fp8_tensor": Stored(
        Fp8Tensor,
        (
            _FP8_DATA,
            Field("scale", ("weight_scale",), _FLOATS, rows=0, accept=as_float32(E4M3_FACTOR)),
            Field("input_scale", ("input_scale",), _FLOATS, 0, 1, as_float32(activation_scale), optional=True),
        ),
    ),
    "fp8_channel": Stored(
        Fp8Channel,
        (
            _FP8_DATA,
            Field(
                "scale",
                ("weight_scale",),
                _FLOATS,
                cols=WHOLE_ROW,
                accept=as_float32(lambda scale, where: E4M3_FACTOR(scale, where)[:, 0]),
            ),
        ),
        (_STATIC_INPUT,),
    ),
    "fp8_block": Stored(
        Fp8Block,
        (_FP8_DATA, Field("scale", ("weight_scale",), _FLOATS, FP8_BLOCK, FP8_BLOCK, as_float32(E4M3_FACTOR))),
    ),
}


def _pack_quantized(scheme: Scheme) -> Stored:
    fields = [
        Field("codes", ("weight_packed",), _INT32, cols=8, accept=codes_of_words),
        Field("scales", ("weight_scale",), _FLOATS, cols=scheme.group, accept=int4_scale),
    ]
    if scheme.zeros:
        zeros = partial(zeros_of_rows, order=IN_ORDER, offset=0)
        fields.append(Field("zeros", ("weight_zero_point",), _INT32, 8, scheme.group, zeros))
    shape = Claim("weight_shape", (torch.int64, torch.int32), lambda rows, cols: (2,), of_this_shape)
    return _grouped(scheme, fields, [shape], "weight_g_idx")


def _grouped(scheme: Scheme, fields: list[Field], claims: list[Claim], order: str) -> Stored:
    if scheme.ordered:
        return Stored(Int4, tuple(fields), tuple(claims), order, scheme.group)
    in_order = Claim(order, _INT32, lambda rows, cols: (cols,), partial(columns_in_order, scheme.group), optional=True)
    return Stored(Int4, tuple(fields), (in_order, *claims))


def _words(scheme: Scheme) -> Stored:
    """GPTQ packs neighbouring inputs, AWQ neighbouring outputs in an order of its own; both transpose."""
    awq, group = scheme.packer == "awq", scheme.group
    codes = Field("codes", ("qweight",), _INT32, cols=8, accept=codes_of_words, transposed=True)
    if awq:
        codes = Field("codes", ("qweight",), _INT32, rows=8, accept=codes_of_rows, transposed=True)
    zeros = partial(zeros_of_rows, order=AWQ_ORDER if awq else IN_ORDER, offset=scheme.zero_offset)
    fields = [codes, Field("scales", ("scales",), _FLOATS, cols=group, accept=int4_scale, transposed=True)]
    claims: list[Claim] = []
    if scheme.zeros:
        fields.append(Field("zeros", ("qzeros",), _INT32, 8, group, zeros, transposed=True))
    else:
        shape = partial(_zeros_shape, group)
        claims.append(Claim("qzeros", _INT32, shape, partial(symmetric_zeros, zeros)))
    return Stored(Int4, tuple(fields)) if awq else _grouped(scheme, fields, claims, "g_idx")


def _zeros_shape(group: int, rows: int, cols: int) -> tuple[int, int]:
    return cols // (group or cols), rows // 8
