"""Says in which tensors of a checkpoint a number format's fields are, how each is cut, and how its values are checked.

`FORMATS` has the names of ModelOpt, DeepSeek and gpt-oss; `stored_as` knows those of the other packers, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from eprt.config import WeightFormat
from eprt.errors import CheckpointError
from eprt.models.schemes import Scheme
from eprt.models.shards import require_finite
from eprt.quant.elements import (
    AWQ_ORDER,
    E2M1_MAX,
    E4M3_MAX,
    E8M0_NAN,
    IN_ORDER,
    codes_along_columns,
    codes_along_rows,
    exact_scales,
    rows_of_words,
)
from eprt.rounding import ceil_div
from eprt.weights import (
    FP8_BLOCK,
    INT4_ZERO,
    MX_BLOCK,
    NVFP4_BLOCK,
    PLAIN,
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
_F32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Field:
    """One tensor of a matrix type.

    Attributes:
        suffixes: the checkpoint's names for it, after the module's name.
        rows, cols: how much of the matrix one entry covers; rows 0 means one number for the whole part, cols 0 a whole
            row.
        accept: checks values and brings them to the canonical dtype.
        optional: read only where all experts have it (calibration writes no input scale of one that it never met).
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

    @property
    def tiles(self) -> bool:
        """Tells whether entries cover squares, as FP8's blocks: the last of a row or column may be smaller."""
        return self.rows == self.cols


@dataclass(frozen=True)
class Claim:
    """A tensor beside a matrix, which isn't kept: it says something that has to be true.

    Attributes:
        shape: (rows, cols) of the whole matrix -> the tensor's.
        require: (values, where, (rows, cols)); raises CheckpointError.
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


# ---- scales: above 0 (INT4's below, too, NVFP4's 0), and no weight that they scale overflows float32 -----------------


def positive_scale(scale: torch.Tensor, where: str, largest: float = 1.0) -> torch.Tensor:
    """Returns scales as they are, E8M0 ones as f32. Raises CheckpointError unless all are above 0, and finite also
    times `largest`, the largest number that they scale."""
    values = scale.float()
    bad = values[~(torch.isfinite(values * largest) & (values > 0))]
    if bad.numel():
        count = f"{bad.numel()} of {values.numel()}"
        most = f"{_F32_MAX / largest:.6g}, beyond which weights overflow float32"
        raise CheckpointError(f"{where}: {count} scales such as {bad[0].item()}: expected above 0, at most {most}")
    return values if scale.dtype == torch.float8_e8m0fnu else scale


def activation_scale(scale: torch.Tensor, where: str) -> torch.Tensor:
    """Returns scales by which tokens are divided. Raises CheckpointError as `positive_scale`, and where 1 / scale is
    infinite."""
    if not torch.isfinite(1 / scale).all():
        raise CheckpointError(f"{where}: scale {scale.min().item()}: expected above 0 by so much that 1 / it is finite")
    return positive_scale(scale, where, E4M3_MAX)


def e8m0_scale(scale: torch.Tensor, where: str, largest: float = 1.0) -> torch.Tensor:
    """Returns scales as E8M0 bytes (value 2 ** (byte - 127)), from bytes, float8_e8m0fnu or f32 powers of two.

    Raises CheckpointError for byte 255 (NaN), for f32 values that aren't powers of two from 2**-127 to 2**127, and for
    scales that overflow float32 times `largest`, the largest number that they scale.
    """
    codes = _e8m0_codes(scale, where)
    highest, most = int(codes.max()) if codes.numel() else 0, int(math.log2(_F32_MAX / largest)) + 127
    if highest > most:
        raise CheckpointError(
            f"{where}: E8M0 scale {highest} of {codes.numel()} scales: expected 0 to {most}, beyond which weights "
            "overflow float32"
        )
    return codes


def _e8m0_codes(scale: torch.Tensor, where: str) -> torch.Tensor:
    if scale.dtype == torch.float32:
        rounded = scale.to(torch.float8_e8m0fnu)
        bad = scale[rounded.float() != scale]
        if bad.numel():
            raise CheckpointError(
                f"{where}: {bad.numel()} of {scale.numel()} scales such as {bad[0].item()}: "
                "expected powers of two (E8M0 stored as float32)"
            )
        return rounded.view(torch.uint8)
    codes = scale.view(torch.uint8)
    bad_count = int((codes == E8M0_NAN).sum())
    if bad_count:
        raise CheckpointError(f"{where}: {bad_count} of {codes.numel()} E8M0 scales are 255 (NaN): expected 0 to 254")
    return codes


# By what they scale: E4M3 or E2M1 numbers, or both at once (NVFP4).
E4M3_FACTOR = partial(positive_scale, largest=E4M3_MAX)
NVFP4_FACTOR = partial(positive_scale, largest=E2M1_MAX * E4M3_MAX)
E2M1_BYTES = partial(e8m0_scale, largest=E2M1_MAX)
E4M3_BYTES = partial(e8m0_scale, largest=E4M3_MAX)


# ---- values of the other fields ----------------------------------------------------------------------------------


def _in_dtype(dtype: torch.dtype) -> Accept:
    """Returns a check that brings plain numbers to the config's dtype, as transformers does where files have another.
    It raises CheckpointError for those that the dtype doesn't hold."""

    def accept(values: torch.Tensor, where: str) -> torch.Tensor:
        if values.dtype == dtype:
            return values
        require_finite(found := values.to(dtype), f"{where}, as {dtype},")
        return found

    return accept


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
    """Returns scales as they are, float16 ones as float32, which holds each exactly. Raises CheckpointError.

    AutoRound's are negative where a group's largest number is positive: codes reach to -8, and only to 7.
    """
    positive_scale(scale.abs(), where, largest=15.0)
    return exact_scales(scale)


def _nvfp4_scale(scale: torch.Tensor, where: str) -> torch.Tensor:
    """Returns E4M3 scales as they are: of 0 is a block whose scale underflowed. Raises CheckpointError."""
    positive_scale(scale[scale.float() != 0], where)
    return scale


def _as_float32(check: Accept) -> Accept:
    """Returns `check` of scales brought to float32, which holds bf16 and float16 ones exactly."""
    return lambda scale, where: check(scale.float(), where)


def _one_a_row(scale: torch.Tensor, where: str) -> torch.Tensor:
    return E4M3_FACTOR(scale.float(), where)[:, 0]


def _reciprocal(check: Accept) -> Accept:
    """Returns `check` of one divided by the stored number, which compressed-tensors divides by."""
    return lambda scale, where: check(1 / positive_scale(scale, where), where)


def _of_this_shape(values: torch.Tensor, where: str, size: tuple[int, int]) -> None:
    if tuple(values.tolist()) != size:
        raise CheckpointError(f"{where} says {values.tolist()}: expected {list(size)}, as config.json does")


def _no_bias(bias: torch.Tensor, where: str, _: tuple[int, int]) -> None:
    """Raises CheckpointError unless a bias, which some packers write for each matrix, is zero."""
    if bias.any():
        raise CheckpointError(
            f"{where}: {int(bias.count_nonzero())} of {bias.numel()} are other than 0: expected no bias"
        )


def _columns_in_order(group: int, index: torch.Tensor, where: str, size: tuple[int, int]) -> None:
    """Raises CheckpointError unless a `g_idx` says that column c belongs to group c // `group`."""
    cols = size[1]
    expected = torch.arange(cols, dtype=torch.int32, device=index.device) // (group or cols)
    if not torch.equal(index, expected):
        place = int((index != expected).nonzero()[0])
        raise CheckpointError(
            f"{where}: column {place} is of group {int(index[place])}, expected {int(expected[place])}, as the config "
            "says that columns are in order; if they are in activation order, set desc_act, or actorder group"
        )


_BYTES, _INT32 = (torch.uint8, torch.int8), (torch.int32,)
_F32, _E4M3, _E8M0 = (torch.float32,), (torch.float8_e4m3fn,), (torch.uint8, torch.float8_e8m0fnu)
_FLOATS = (*_F32, torch.bfloat16, torch.float16)
_BLOCK_SCALES = (*_FLOATS, torch.float8_e8m0fnu)  # Qwen's are bf16 or float16, DeepSeek-V4's E8M0
_CODES = Field("codes", ("weight",), _BYTES, cols=2, accept=lambda codes, where: codes.view(torch.uint8))
_FP8_DATA = Field("data", ("weight",), _E4M3)
_INPUT_SCALE = Field("input_scale", ("input_scale",), _F32, rows=0, accept=activation_scale, optional=True)
_FLOAT_FACTOR = _as_float32(E4M3_FACTOR)
_OF_BLOCKS = ("weight_scale_inv", "scale", "weight_scale")  # DeepSeek-V3's, V4's, ModelOpt's: factors, all of them
_OF_TOKENS = ("input_scale", "activation_scale")  # ModelOpt's and compressed-tensors', transformers'
FORMATS: dict[WeightFormat, Stored] = {
    "bf16": Stored(Dense, (Field("data", ("weight",), PLAIN, accept=_in_dtype(torch.bfloat16)),)),
    "f32": Stored(Dense, (Field("data", ("weight",), PLAIN, accept=_in_dtype(torch.float32)),)),
    "mxfp4": Stored(
        Mxfp4,
        (_CODES, Field("scales", ("scale", "weight_scale_inv"), (*_E8M0, *_F32), cols=MX_BLOCK, accept=E2M1_BYTES)),
    ),
    "nvfp4": Stored(
        Nvfp4,
        (
            _CODES,
            Field("scales", ("weight_scale",), _E4M3, cols=NVFP4_BLOCK, accept=_nvfp4_scale),
            Field("global_scale", ("weight_scale_2",), _F32, rows=0, accept=NVFP4_FACTOR),
            _INPUT_SCALE,
        ),
    ),
    "fp8_tensor": Stored(
        Fp8Tensor,
        (
            _FP8_DATA,
            Field("scale", ("weight_scale", "weight_scale_inv"), _FLOATS, rows=0, accept=_FLOAT_FACTOR),
            Field("input_scale", _OF_TOKENS, _FLOATS, 0, 1, _as_float32(activation_scale), optional=True),
        ),
    ),
    "fp8_block": Stored(
        Fp8Block,
        (_FP8_DATA, Field("scale", _OF_BLOCKS, _BLOCK_SCALES, FP8_BLOCK, FP8_BLOCK, _FLOAT_FACTOR)),
    ),
    "fp8_channel": Stored(
        Fp8Channel, (_FP8_DATA, Field("scale", ("weight_scale",), _FLOATS, cols=WHOLE_ROW, accept=_one_a_row))
    ),
    "mxfp8": Stored(Mxfp8, (_FP8_DATA, Field("scales", ("weight_scale",), _E8M0, cols=MX_BLOCK, accept=E4M3_BYTES))),
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
            Field("scales", ("weight_scale",), _E4M3, cols=NVFP4_BLOCK, accept=_nvfp4_scale),
            Field("global_scale", ("weight_global_scale",), _F32, rows=0, accept=_reciprocal(NVFP4_FACTOR)),
            Field("input_scale", ("input_global_scale",), _F32, 0, 1, _reciprocal(activation_scale), optional=True),
        ),
    ),
    "fp8_channel": replace(FORMATS["fp8_channel"], claims=(_STATIC_INPUT,)),
    "mxfp4": Stored(
        Mxfp4,
        (
            Field("codes", ("weight_packed",), _BYTES, cols=2, accept=_CODES.accept),
            Field("scales", ("weight_scale",), _E8M0, cols=MX_BLOCK, accept=E2M1_BYTES),
        ),
    ),
}


def _pack_quantized(scheme: Scheme) -> Stored:
    fields = [
        Field("codes", ("weight_packed",), _INT32, cols=8, accept=lambda words, where: codes_along_columns(words)),
        Field("scales", ("weight_scale",), _FLOATS, cols=scheme.group, accept=_int4_scale),
    ]
    if scheme.zeros:
        zeros = partial(_zeros_of_rows, order=IN_ORDER, offset=0)
        fields.append(Field("zeros", ("weight_zero_point",), _INT32, 8, scheme.group, zeros))
    shape = Claim("weight_shape", (torch.int64, torch.int32), lambda rows, cols: (2,), _of_this_shape)
    return _grouped(scheme, fields, [shape], "weight_g_idx")


def _grouped(scheme: Scheme, fields: list[Field], claims: list[Claim], order: str) -> Stored:
    claims.append(Claim("bias", _FLOATS, lambda rows, cols: (rows,), _no_bias, optional=True))
    if scheme.ordered:
        return Stored(Int4, tuple(fields), tuple(claims), order, scheme.group)
    in_order = Claim(order, _INT32, lambda rows, cols: (cols,), partial(_columns_in_order, scheme.group), optional=True)
    return Stored(Int4, tuple(fields), (in_order, *claims))


def _words(scheme: Scheme) -> Stored:
    """GPTQ packs neighbouring inputs, AWQ neighbouring outputs in an order of its own; both transpose."""
    awq, group = scheme.packer == "awq", scheme.group
    field = partial(Field, transposed=True)
    if awq:
        codes = field("codes", ("qweight",), _INT32, rows=8, accept=lambda words, _: codes_along_rows(words, AWQ_ORDER))
    else:
        codes = field("codes", ("qweight",), _INT32, cols=8, accept=lambda words, _: codes_along_columns(words))
    zeros = partial(_zeros_of_rows, order=AWQ_ORDER if awq else IN_ORDER, offset=scheme.zero_offset)
    fields = [codes, field("scales", ("scales",), _FLOATS, cols=group, accept=_int4_scale)]
    claims: list[Claim] = []
    if scheme.zeros:
        fields.append(field("zeros", ("qzeros",), _INT32, 8, group, zeros))
    else:
        require = partial(_symmetric_zeros, zeros)
        claims.append(Claim("qzeros", _INT32, lambda rows, cols: (ceil_div(cols, group or cols), rows // 8), require))
    return Stored(Int4, tuple(fields)) if awq else _grouped(scheme, fields, claims, "g_idx")
