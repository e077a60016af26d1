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
from eprt.errors import CheckpointError
from eprt.models.scales import E2M1_BYTES, E4M3_BYTES, E4M3_FACTOR, NVFP4_FACTOR, activation_scale, positive_scale
from eprt.models.schemes import Scheme
from eprt.quant.elements import AWQ_ORDER, IN_ORDER, codes_along_columns, codes_along_rows, exact_scales, rows_of_words
from eprt.weights import (
    FP8_BLOCK,
    INT4_ZERO,
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
Accept = Callable[[torch.Tensor, str], torch.Tensor]
WHOLE_ROW = 0  # as a field's columns


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
    accept: Accept = lambda values, where: values
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
    require: Callable[[torch.Tensor, str, tuple[int, int]], object]
    optional: bool = False


@dataclass(frozen=True)
class Stored:
    """The tensors of a matrix in files: the fields of its type, and what else is read beside them.

    Attributes:
        order: suffix of the tensor that says each column's group, where columns may be out of order (`models.formats`).
        group: columns of a group there; 0 is the whole row.
    """

    kind: type[Matrix]
    fields: tuple[Field, ...]
    claims: tuple[Claim, ...] = ()
    order: str = ""
    group: int = 0


def _codes_of_words(words: torch.Tensor, where: str) -> torch.Tensor:
    return codes_along_columns(words)


def _codes_of_rows(words: torch.Tensor, where: str) -> torch.Tensor:
    return codes_along_rows(words, AWQ_ORDER)


def _zeros_of_rows(words: torch.Tensor, where: str, order: tuple[int, ...], offset: int) -> torch.Tensor:
    """Returns zero points u8 [rows, groups] of int32 [rows/8, groups]. Raises CheckpointError for one above 15."""
    zeros = rows_of_words(words, order) + offset
    if (zeros > 15).any():
        raise CheckpointError(
            f"{where}: {int((zeros > 15).sum())} zero points of 16 (stored as 15, one less): expected 0 to 15; is its "
            "checkpoint_format gptq_v2?"
        )
    return zeros


def _symmetric_zeros(read: Accept, words: torch.Tensor, where: str, size: tuple[int, int]) -> None:
    """Raises CheckpointError unless all zero points of a symmetric GPTQ matrix are 8."""
    zeros = read(words.mT, where)
    if (zeros != INT4_ZERO).any():
        bad = zeros[zeros != INT4_ZERO]
        raise CheckpointError(
            f"{where}: {bad.numel()} of {zeros.numel()} zero points such as {int(bad[0])}: expected {INT4_ZERO}, the "
            "config says sym; set it to false, or set the right checkpoint_format"
        )


def _int4_scale(scale: torch.Tensor, where: str) -> torch.Tensor:
    """Returns scales as they are, float16 ones as float32, which holds each exactly. Raises CheckpointError."""
    positive_scale(scale, where, largest=15.0)
    return exact_scales(scale)


def _as_float32(check: Accept) -> Accept:
    """Returns `check` of scales brought to float32, which holds bf16 and float16 ones exactly."""
    return lambda scale, where: check(scale.float(), where)


def _one_a_row(scale: torch.Tensor, where: str) -> torch.Tensor:
    return E4M3_FACTOR(scale.float(), where)[:, 0]


def _reciprocal(check: Accept) -> Accept:
    """Returns `check` of one divided by the stored number, which compressed-tensors divides by."""
    return lambda scale, where: check(1 / positive_scale(scale, where), where)


def _of_this_shape(values: torch.Tensor, where: str, size: tuple[int, int]) -> None:
    """Raises CheckpointError unless a `weight_shape` is the matrix's."""
    if tuple(values.tolist()) != size:
        raise CheckpointError(f"{where} says {values.tolist()}: expected {list(size)}, as config.json does")


def _columns_in_order(group: int, index: torch.Tensor, where: str, size: tuple[int, int]) -> None:
    """Raises CheckpointError unless a `g_idx` says that column c belongs to group c // `group`."""
    cols = size[1]
    expected = torch.arange(cols, dtype=torch.int32) // (group or cols)
    if not torch.equal(index, expected):
        place = int((index != expected).nonzero()[0])
        raise CheckpointError(
            f"{where}: column {place} is of group {int(index[place])}, expected {int(expected[place])}, as the config "
            "says that columns are in order; if they are in activation order, set desc_act, or actorder group"
        )


_BYTES, _INT32 = (torch.uint8, torch.int8), (torch.int32,)
_F32, _E4M3, _E8M0 = (torch.float32,), (torch.float8_e4m3fn,), (torch.uint8, torch.float8_e8m0fnu)
_BLOCK_SCALES = (*_F32, torch.bfloat16, torch.float8_e8m0fnu)
_FLOATS = (*_F32, torch.bfloat16, torch.float16)
_CODES = Field("codes", ("weight",), _BYTES, cols=2, accept=lambda codes, where: codes.view(torch.uint8))
_FP8_DATA = Field("data", ("weight",), _E4M3)
_INPUT_SCALE = Field("input_scale", ("input_scale",), _F32, rows=0, accept=activation_scale, optional=True)
# `weight_scale_inv` (DeepSeek-V3) and `scale` (DeepSeek-V4) are factors, whatever the first one's name says.
FORMATS: dict[WeightFormat, Stored] = {
    "bf16": Stored(Dense, (Field("data", ("weight",), (torch.bfloat16,)),)),
    "f32": Stored(Dense, (Field("data", ("weight",), _F32),)),
    "mxfp4": Stored(
        Mxfp4,
        (
            _CODES,
            Field("scales", ("scale", "weight_scale_inv"), (*_E8M0, *_F32), cols=MX_BLOCK, accept=E2M1_BYTES),
        ),
    ),
    "nvfp4": Stored(
        Nvfp4,
        (
            _CODES,
            Field("scales", ("weight_scale",), _E4M3, cols=NVFP4_BLOCK, accept=positive_scale),
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
            Field("scale", ("weight_scale_inv", "scale"), _BLOCK_SCALES, FP8_BLOCK, FP8_BLOCK, E4M3_FACTOR),
        ),
    ),
    "mxfp8": Stored(
        Mxfp8,
        (
            _FP8_DATA,
            Field("scales", ("weight_scale",), _E8M0, cols=MX_BLOCK, accept=E4M3_BYTES),
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


_STATIC_INPUT = Claim(
    "input_scale", _FLOATS, lambda rows, cols: (1,), lambda scale, where, _: positive_scale(scale, where), optional=True
)
_COMPRESSED: dict[WeightFormat, Stored] = {
    **FORMATS,
    "nvfp4": Stored(
        Nvfp4,
        (
            Field("codes", ("weight_packed",), _BYTES, cols=2, accept=_CODES.accept),
            Field("scales", ("weight_scale",), _E4M3, cols=NVFP4_BLOCK, accept=positive_scale),
            Field("global_scale", ("weight_global_scale",), _F32, rows=0, accept=_reciprocal(NVFP4_FACTOR)),
            Field("input_scale", ("input_global_scale",), _F32, 0, 1, _reciprocal(activation_scale), optional=True),
        ),
    ),
    "fp8_tensor": Stored(
        Fp8Tensor,
        (
            _FP8_DATA,
            Field("scale", ("weight_scale",), _FLOATS, rows=0, accept=_as_float32(E4M3_FACTOR)),
            Field("input_scale", ("input_scale",), _FLOATS, 0, 1, _as_float32(activation_scale), optional=True),
        ),
    ),
    "fp8_channel": Stored(
        Fp8Channel,
        (
            _FP8_DATA,
            Field("scale", ("weight_scale",), _FLOATS, cols=WHOLE_ROW, accept=_one_a_row),
        ),
        (_STATIC_INPUT,),
    ),
    "fp8_block": Stored(
        Fp8Block,
        (_FP8_DATA, Field("scale", ("weight_scale",), _FLOATS, FP8_BLOCK, FP8_BLOCK, _as_float32(E4M3_FACTOR))),
    ),
}


def _pack_quantized(scheme: Scheme) -> Stored:
    fields = [
        Field("codes", ("weight_packed",), _INT32, cols=8, accept=_codes_of_words),
        Field("scales", ("weight_scale",), _FLOATS, cols=scheme.group, accept=_int4_scale),
    ]
    if scheme.zeros:
        zeros = partial(_zeros_of_rows, order=IN_ORDER, offset=0)
        fields.append(Field("zeros", ("weight_zero_point",), _INT32, 8, scheme.group, zeros))
    shape = Claim("weight_shape", (torch.int64, torch.int32), lambda rows, cols: (2,), _of_this_shape)
    return _grouped(scheme, fields, [shape], "weight_g_idx")


def _grouped(scheme: Scheme, fields: list[Field], claims: list[Claim], order: str) -> Stored:
    if scheme.ordered:
        return Stored(Int4, tuple(fields), tuple(claims), order, scheme.group)
    in_order = Claim(order, _INT32, lambda rows, cols: (cols,), partial(_columns_in_order, scheme.group), optional=True)
    return Stored(Int4, tuple(fields), (in_order, *claims))


def _words(scheme: Scheme) -> Stored:
    """GPTQ packs neighbouring inputs, AWQ neighbouring outputs in an order of its own; both transpose."""
    awq, group = scheme.packer == "awq", scheme.group
    codes = Field("codes", ("qweight",), _INT32, cols=8, accept=_codes_of_words, transposed=True)
    if awq:
        codes = Field(
            "codes",
            ("qweight",),
            _INT32,
            rows=8,
            accept=_codes_of_rows,
            transposed=True,
        )
    zeros = partial(_zeros_of_rows, order=AWQ_ORDER if awq else IN_ORDER, offset=scheme.zero_offset)
    fields = [codes, Field("scales", ("scales",), _FLOATS, cols=group, accept=_int4_scale, transposed=True)]
    claims: list[Claim] = []
    if scheme.zeros:
        fields.append(Field("zeros", ("qzeros",), _INT32, 8, group, zeros, transposed=True))
    else:
        shape = partial(_zeros_shape, group)
        claims.append(Claim("qzeros", _INT32, shape, partial(_symmetric_zeros, zeros)))
    return Stored(Int4, tuple(fields)) if awq else _grouped(scheme, fields, claims, "g_idx")


def _zeros_shape(group: int, rows: int, cols: int) -> tuple[int, int]:
    return cols // (group or cols), rows // 8
