"""Tensors of a checkpoint -> canonical matrices: which fields a number format has, how each is cut and checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from eprt.config import MoEConfig, WeightFormat
from eprt.errors import CheckpointError, ConfigError
from eprt.models.checkpoint import Checkpoint
from eprt.placement import ExpertShard
from eprt.quant import decode
from eprt.rounding import ceil_div
from eprt.weights import (
    FP8_BLOCK,
    MX_BLOCK,
    NVFP4_BLOCK,
    Dense,
    ExpertWeights,
    Fp8Block,
    Fp8Tensor,
    Matrix,
    Mxfp4,
    Mxfp8,
    Nvfp4,
)

Part = Literal["gate", "up", "down"]
_E4M3, _E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
_E8M0_NAN = 255


def positive_scale(scale: torch.Tensor, where: str) -> torch.Tensor:
    """f32 or e4m3 scales, unchanged; E8M0 ones as f32. Raises CheckpointError unless all are finite and above 0."""
    values = scale.float()
    bad = int((~(torch.isfinite(values) & (values > 0))).sum())
    if bad:
        example = values[~(torch.isfinite(values) & (values > 0))].flatten()[0].item()
        raise CheckpointError(
            f"{where}: {bad} of {values.numel()} scales such as {example}: expected finite and above 0"
        )
    return values if scale.dtype == _E8M0 else scale


def e8m0_scale(scale: torch.Tensor, where: str) -> torch.Tensor:
    """Scales as E8M0 bytes (value 2 ** (byte - 127)), from bytes, float8_e8m0fnu or f32 powers of two.

    Raises CheckpointError for byte 255 (NaN) and for f32 values that aren't powers of two from 2**-127 to 2**127.
    """
    if scale.dtype == torch.float32:
        bits = scale.contiguous().view(torch.int32)
        code = (bits >> 23) & 0xFF
        # 2**-127 lies below the normal range of float32: exponent 0 and the top mantissa bit alone.
        smallest = bits == 0x00400000
        power = (bits > 0) & (bits & 0x7FFFFF == 0) & (code < _E8M0_NAN)
        bad = scale[~(power | smallest)]
        if bad.numel():
            raise CheckpointError(
                f"{where}: {bad.numel()} of {scale.numel()} scales such as {bad[0].item()}: "
                "expected powers of two (E8M0 stored as float32)"
            )
        return code.to(torch.uint8)
    codes = scale.view(torch.uint8)
    bad_count = int((codes == _E8M0_NAN).sum())
    if bad_count:
        raise CheckpointError(f"{where}: {bad_count} of {codes.numel()} E8M0 scales are 255 (NaN): expected 0 to 254")
    return codes


def _as_bytes(codes: torch.Tensor, where: str) -> torch.Tensor:
    return codes.view(torch.uint8)


def _unchanged(values: torch.Tensor, where: str) -> torch.Tensor:
    return values


@dataclass(frozen=True)
class Field:
    """One tensor of a matrix type.

    Attributes:
        name: the matrix type's field.
        suffixes: the checkpoint's names for it, after the module's name.
        dtypes: those it may be stored in.
        rows, cols: how much of the matrix one entry covers; rows 0 means one number for the whole part.
        accept: checks values and brings them to the canonical dtype.
        optional: may be absent from all experts (never from some).
    """

    name: str
    suffixes: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    rows: int = 1
    cols: int = 1
    accept: Callable[[torch.Tensor, str], torch.Tensor] = _unchanged
    optional: bool = False

    def entries(self, size: tuple[int, int]) -> tuple[int, int]:
        """The field's own shape for a part of `size` rows and columns."""
        return ceil_div(size[0], self.rows), ceil_div(size[1], self.cols)


_BYTES = (torch.uint8, torch.int8)
_F32 = (torch.float32,)
_CODES = Field("codes", ("weight",), _BYTES, cols=2, accept=_as_bytes)
_FP8_DATA = Field("data", ("weight",), (_E4M3,))
_INPUT_SCALE = Field("input_scale", ("input_scale",), _F32, rows=0, accept=positive_scale, optional=True)

# `weight_scale_inv` (DeepSeek-V3) and `scale` (DeepSeek-V4) are factors, whatever the first one's name says.
FORMATS: dict[WeightFormat, tuple[type[Matrix], tuple[Field, ...]]] = {
    "bf16": (Dense, (Field("data", ("weight",), (torch.bfloat16,)),)),
    "f32": (Dense, (Field("data", ("weight",), _F32),)),
    "mxfp4": (
        Mxfp4,
        (
            _CODES,
            Field(
                "scales", ("scale", "weight_scale_inv"), (torch.uint8, _E8M0, *_F32), cols=MX_BLOCK, accept=e8m0_scale
            ),
        ),
    ),
    "nvfp4": (
        Nvfp4,
        (
            _CODES,
            Field("scales", ("weight_scale",), (_E4M3,), cols=NVFP4_BLOCK, accept=positive_scale),
            Field("global_scale", ("weight_scale_2",), _F32, rows=0, accept=positive_scale),
            _INPUT_SCALE,
        ),
    ),
    "fp8_tensor": (
        Fp8Tensor,
        (_FP8_DATA, Field("scale", ("weight_scale",), _F32, rows=0, accept=positive_scale), _INPUT_SCALE),
    ),
    "fp8_block": (
        Fp8Block,
        (
            _FP8_DATA,
            Field("scale", ("weight_scale_inv", "scale"), (*_F32, _E8M0), FP8_BLOCK, FP8_BLOCK, positive_scale),
        ),
    ),
    "mxfp8": (
        Mxfp8,
        (_FP8_DATA, Field("scales", ("weight_scale",), (torch.uint8, _E8M0), cols=MX_BLOCK, accept=e8m0_scale)),
    ),
}


@dataclass(frozen=True)
class Location:
    """Where a part may be: a tensor of its own, or rows `chunk` of `chunks` of entry `lead[0]` of a stacked one, whose
    last two dimensions may be `transposed`: [in, out]."""

    name: str
    lead: tuple[int, ...] = ()
    lead_shape: tuple[int, ...] = ()
    chunk: int = 0
    chunks: int = 1
    transposed: bool = False


@dataclass(frozen=True)
class ExpertNames:
    """Names of a layer's expert tensors.

    Attributes:
        prefix: e.g. `model.layers.3.mlp.experts`.
        num_experts: E.
        aliases: module names of each part where experts are apart: `<prefix>.<expert>.<alias>.weight`.
        stacked: of each part, where all experts are one tensor: (name, chunk, chunks), `<prefix>.<name>`.
        transposed: whether that tensor is [E, in, out].
    """

    prefix: str
    num_experts: int
    aliases: dict[Part, tuple[str, ...]]
    stacked: dict[Part, tuple[str, int, int]]
    transposed: bool = False

    def locate(self, expert: int, part: Part, field: Field) -> list[Location]:
        apart = [
            Location(f"{self.prefix}.{expert}.{alias}.{suffix}")
            for suffix in field.suffixes
            for alias in self.aliases[part]
        ]
        if field.rows == 0:
            return apart
        name, chunk, chunks = self.stacked[part]
        for suffix in field.suffixes:
            ending = "" if suffix == "weight" else "_" + suffix.removeprefix("weight_")
            stacked = f"{self.prefix}.{name}{ending}"
            apart.append(Location(stacked, (expert,), (self.num_experts,), chunk, chunks, self.transposed))
        return apart


Locate = Callable[[int, Part, Field], list[Location]]


def load_experts(checkpoint: Checkpoint, names: ExpertNames, config: MoEConfig, shard: ExpertShard) -> ExpertWeights:
    """This rank's experts. Raises CheckpointError or ConfigError; nothing is returned unless all of it is right."""
    _refuse_extra_expert(checkpoint, names)
    width = shard.slice_intermediate(config.intermediate_size)
    H, I = config.hidden_size, config.intermediate_size
    everyone = range(config.num_experts)
    first: tuple[Part, ...] = ("gate", "up") if config.activation.gated else ("up",)
    whole = slice(0, H)
    gate_up = load_matrix(
        checkpoint, config.weight_format, names.locate, shard.experts, everyone, first, (I, H), (width, whole)
    )
    down = load_matrix(
        checkpoint, config.weight_format, names.locate, shard.experts, everyone, ("down",), (H, I), (whole, width)
    )
    weights = ExpertWeights(gate_up, down)
    weights.check(config, shard)
    return weights


def _refuse_extra_expert(checkpoint: Checkpoint, names: ExpertNames) -> None:
    for alias in names.aliases["down"]:
        extra = f"{names.prefix}.{names.num_experts}.{alias}.weight"
        if extra in checkpoint:
            raise CheckpointError(f"{checkpoint.where(extra)}: config.json says there are {names.num_experts} experts")


def load_matrix(
    checkpoint: Checkpoint,
    format: WeightFormat,
    locate: Locate,
    experts: Sequence[int],
    everyone: range,
    parts: tuple[Part, ...],
    size: tuple[int, int],
    take: tuple[slice, slice],
) -> Matrix:
    """A canonical matrix of the local experts, read one part of one expert at a time.

    Args:
        format: what the config says the tensors are.
        locate: candidates for a field of a part of an expert, in order.
        experts, everyone: this rank's, in the order of its slots; all of them (whether an optional field exists).
        parts: stacked along the rows.
        size: rows and columns of a whole part.
        take: rows and columns of it that this rank holds.

    Raises:
        CheckpointError: a tensor is missing, has another shape or dtype, or holds a bad scale.
        ConfigError: the slice cuts a scale block.
    """
    kind, fields = FORMATS[format]
    tensors: dict[str, torch.Tensor] = {}
    for field in fields:
        if field.optional and not _exists(checkpoint, field, locate, everyone, parts):
            continue
        out: torch.Tensor | None = None
        for row, expert in enumerate(experts):
            for at, part in enumerate(parts):
                piece = _read_piece(checkpoint, field, locate(expert, part, field), size, take)
                if out is None:
                    out = piece.new_empty((len(experts), len(parts), *piece.shape))
                out[row, at] = piece
        if out is not None:
            tensors[field.name] = out if field.rows == 0 else out.flatten(1, 2)
    return kind(**tensors)


def _exists(checkpoint: Checkpoint, field: Field, locate: Locate, experts: range, parts: tuple[Part, ...]) -> bool:
    return any(found.name in checkpoint for e in experts for part in parts for found in locate(e, part, field))


def _read_piece(
    checkpoint: Checkpoint,
    field: Field,
    locations: list[Location],
    size: tuple[int, int],
    take: tuple[slice, slice],
) -> torch.Tensor:
    name = checkpoint.first(*(location.name for location in locations))
    location = next(location for location in locations if location.name == name)
    if field.rows == 0:
        value = checkpoint.read(name, dtypes=field.dtypes)
        if value.numel() != 1:
            raise CheckpointError(f"{checkpoint.where(name)} has shape {tuple(value.shape)}: expected one number")
        return field.accept(value.reshape(()), checkpoint.where(name))
    if location.chunks > 1 and size[0] % field.rows:
        raise ConfigError(
            f"{checkpoint.where(name)}: {size[0]} rows of gate end inside a block of {field.rows} that up shares"
        )
    grid = field.entries(size)
    rows = _entry_slice(take[0], size[0], field.rows)
    cols = _entry_slice(take[1], size[1], field.cols)
    offset = location.chunk * grid[0]
    index, shape = (slice(offset + rows.start, offset + rows.stop), cols), (location.chunks * grid[0], grid[1])
    if location.transposed:
        index, shape = index[::-1], shape[::-1]
    values = checkpoint.read(name, (*location.lead, *index), shape=(*location.lead_shape, *shape), dtypes=field.dtypes)
    return field.accept(values.mT if location.transposed else values, checkpoint.where(name))


def _entry_slice(take: slice, size: int, block: int) -> slice:
    """Matrix rows or columns -> a field's entries. Only FP8's 128-blocks may be left over at the end."""
    ragged = size % block and block != FP8_BLOCK
    if ragged or take.start % block or (take.stop % block and take.stop != size):
        raise ConfigError(
            f"[{take.start}, {take.stop}) of {size} cuts a scale block of {block}; choose a moe_tp_size that keeps "
            f"blocks whole"
        )
    return slice(take.start // block, ceil_div(take.stop, block))


def load_linear(checkpoint: Checkpoint, modules: tuple[str, ...], rows: int, cols: int) -> torch.Tensor:
    """A dense layer's weight [rows, cols] in bf16 or f32, decoded to bf16 if it is packed. Raises CheckpointError.

    Args:
        modules: the checkpoint's possible names for the layer.
    """
    weight = checkpoint.first(*(f"{module}.weight" for module in modules))
    module = weight.removesuffix(".weight")
    format = _format_of(checkpoint, module)

    def locate(expert: int, part: Part, field: Field) -> list[Location]:
        return [Location(f"{module}.{suffix}") for suffix in field.suffixes]

    whole = (slice(0, rows), slice(0, cols))
    matrix = load_matrix(checkpoint, format, locate, range(1), range(1), ("down",), (rows, cols), whole)
    dtype = torch.float32 if format == "f32" else torch.bfloat16
    return decode(matrix, 1, dtype)[0]


def _format_of(checkpoint: Checkpoint, module: str) -> WeightFormat:
    """Number format of a layer outside the routed experts, by its own tensors. Raises CheckpointError."""
    name = f"{module}.weight"
    dtype = checkpoint.manifest[name].dtype
    packed = {suffix for suffix in ("weight_scale", "weight_scale_2", "weight_scale_inv", "scale")}
    present = {suffix for suffix in packed if f"{module}.{suffix}" in checkpoint}
    if dtype in ("BF16", "F32"):
        return "bf16" if dtype == "BF16" else "f32"
    if dtype in ("U8", "I8"):
        return "nvfp4" if "weight_scale_2" in present else "mxfp4"
    if dtype == "F8_E4M3" and present & {"weight_scale_inv", "scale"}:
        return "fp8_block"
    if dtype == "F8_E4M3" and "weight_scale" in present:
        return "mxfp8" if checkpoint.manifest[f"{module}.weight_scale"].dtype in ("U8", "F8_E8M0") else "fp8_tensor"
    raise CheckpointError(f"{checkpoint.where(name)} has dtype {dtype} and scales {sorted(present) or 'none'}: unknown")
