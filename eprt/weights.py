"""Expert weights in the checkpoint's own numbers, in one canonical order, unpadded.

A matrix is a stack of `[L, rows, cols]` (L local experts, rows = outputs, cols = inputs) in one of the number formats
below. The first matrix of a gated expert stacks `[gate; up]` along its rows: `parts` is 2 there, else 1. Whatever a
checkpoint's order or interleaving, `models/` brings it to this one; each executor's preparation starts from it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch

from eprt.config import MoEConfig, WeightFormat
from eprt.errors import ConfigError
from eprt.placement import ExpertShard
from eprt.rounding import ceil_div

MX_BLOCK = 32  # OCP Microscaling v1.0, section 5.2: one E8M0 scale for 32 elements along the columns
NVFP4_BLOCK = 16  # one E4M3 scale for 16 elements along the columns
FP8_BLOCK = 128  # DeepSeek's 128 x 128 float32 block scales
INT4_GROUPS = (32, 64, 128)  # columns that share a scale; or the whole row does
INT4_ZERO = 8  # the code of 0 where a matrix has no zero points of its own

PLAIN = (torch.bfloat16, torch.float32)

M = TypeVar("M", bound="Matrix")


@dataclass(frozen=True)
class Matrix(ABC):
    """Base class of the number formats. Subclasses list their tensors [L, ...]; None as default: it may be missing."""

    format: ClassVar[tuple[WeightFormat, ...]]
    whole_columns: ClassVar[int] = 1  # the format has no way to write a number of columns that this doesn't divide
    values_per_element: ClassVar[int] = 1  # of the tensor in the first field

    @property
    def shape(self) -> tuple[int, int, int]:
        """Logical (L, rows, cols)."""
        L, rows, cols = getattr(self, dataclasses.fields(self)[0].name).shape
        return L, rows, cols * self.values_per_element

    @abstractmethod
    def expected(self, rows: int, cols: int, parts: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Returns by field name (shape without L, dtype) for a logical [rows, cols] matrix."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns by name the fields that hold tensors and are set."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}

    def map(self: M, change: Callable[[torch.Tensor], torch.Tensor]) -> M:
        """Returns a copy with every tensor changed (moved, sliced along L)."""
        return dataclasses.replace(self, **{name: change(tensor) for name, tensor in self.tensors().items()})

    def expert(self: M, index: int) -> M:
        """Returns one expert, still with a leading dimension of 1. A view."""
        return self.map(lambda tensor: tensor[index : index + 1])

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors().values())).device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def check(self, name: str, num_local: int, rows: int, cols: int, parts: int) -> None:
        """Raises ConfigError naming the tensor unless every field has the documented shape and dtype."""
        if cols % self.whole_columns:
            raise ConfigError(
                f"{name} has {cols} columns: {type(self).__name__} needs a multiple of {self.whole_columns}, "
                "one scale's worth"
            )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, torch.Tensor) and not (value is None and field.default is None):
                found = "missing" if value is None else type(value).__name__
                raise ConfigError(f"{name}.{field.name} is {found}: {type(self).__name__} weights need a tensor")
        tensors, expected = self.tensors(), self.expected(rows, cols, parts)
        for field, tensor in tensors.items():
            shape, dtype = expected[field]
            if tensor.is_meta:
                raise ConfigError(
                    f"{name}.{field} is on the meta device, which holds no numbers: load the weights first"
                )
            if tuple(tensor.shape) != (num_local, *shape) or tensor.dtype != dtype:
                raise ConfigError(
                    f"{name}.{field} is {tuple(tensor.shape)} {tensor.dtype}: expected {(num_local, *shape)} {dtype}"
                )


@dataclass(frozen=True)
class Dense(Matrix):
    """Plain numbers: data [L, rows, cols], bf16 or f32."""

    data: torch.Tensor
    format = ("bf16", "f32")

    def expected(self, rows: int, cols: int, parts: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        dtype = self.data.dtype if self.data.dtype in PLAIN else torch.bfloat16
        return {"data": ((rows, cols), dtype)}


@dataclass(frozen=True)
class Mxfp4(Matrix):
    """OCP MXFP4: `codes` u8 [L, rows, cols/2] (two E2M1, low nibble first), `scales` u8 E8M0 [L, rows, cols/32].

    value = e2m1(code) * 2 ** (scale - 127); scale 255 is NaN.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    format = ("mxfp4",)
    values_per_element = 2
    whole_columns = MX_BLOCK

    def expected(self, rows: int, cols: int, parts: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"codes": ((rows, cols // 2), torch.uint8), "scales": ((rows, cols // MX_BLOCK), torch.uint8)}


@dataclass(frozen=True)
class Nvfp4(Matrix):
    """NVFP4: `codes` u8 [L, rows, cols/2], `scales` e4m3 [L, rows, cols/16], `global_scale` f32 [L, parts].

    value = e2m1(code) * scale * global_scale[part of the row]; gate and up may have different global scales.
    `input_scale` f32 [L, parts]: the checkpoint's calibrated activation scale (ModelOpt), or None (weight-only).
    """

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor
    input_scale: torch.Tensor | None = None
    format = ("nvfp4",)
    values_per_element = 2
    whole_columns = NVFP4_BLOCK

    def expected(self, rows: int, cols: int, parts: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {
            "codes": ((rows, cols // 2), torch.uint8),
            "scales": ((rows, cols // NVFP4_BLOCK), torch.float8_e4m3fn),
            "global_scale": ((parts,), torch.float32),
            "input_scale": ((parts,), torch.float32),
        }


@dataclass(frozen=True)
class Fp8Tensor(Matrix):
    """FP8 with one scale per matrix: `data` e4m3 [L, rows, cols], `scale` f32 [L, parts]; value = data * scale."""

    data: torch.Tensor
    scale: torch.Tensor
    input_scale: torch.Tensor | None = None
    format = ("fp8_tensor",)

    def expected(self, rows: int, cols: int, parts: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        scale = (parts,), torch.float32
        return {"data": ((rows, cols), torch.float8_e4m3fn), "scale": scale, "input_scale": scale}


@dataclass(frozen=True)
class Fp8Block(Matrix):
    """DeepSeek's block FP8: `data` e4m3 [L, rows, cols], `scale` f32 [L, parts * ceil(rows/parts/128), ceil(cols/128)].

    Each part (gate, up) has a block grid of its own, so halves that aren't multiples of 128 keep their blocks.
    """

    data: torch.Tensor
    scale: torch.Tensor
    format = ("fp8_block",)

    def expected(self, rows: int, cols: int, parts: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        grid = (parts * ceil_div(rows // parts, FP8_BLOCK), ceil_div(cols, FP8_BLOCK))
        return {"data": ((rows, cols), torch.float8_e4m3fn), "scale": (grid, torch.float32)}


@dataclass(frozen=True)
class Fp8Channel(Matrix):
    """FP8 with one scale per output row: `data` e4m3 [L, rows, cols], `scale` f32 [L, rows]; value = data * scale."""

    data: torch.Tensor
    scale: torch.Tensor
    format = ("fp8_channel",)

    def expected(self, rows: int, cols: int, parts: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"data": ((rows, cols), torch.float8_e4m3fn), "scale": ((rows,), torch.float32)}


@dataclass(frozen=True)
class Int4(Matrix):
    """INT4: `codes` u8 [L, rows, cols/2] (unsigned, low nibble first), `scales` bf16 or f32 [L, rows, cols/group].

    value = (code - zero) * scale. A group is 32, 64 or 128 columns, or the whole row. `zeros` u8 [L, rows, cols/group]
    holds the groups' zero points, 0 to 15; None means 8.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    format = ("int4",)
    values_per_element = 2
    whole_columns = 2

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return 2 * self.codes.shape[-1] // max(1, self.scales.shape[-1])

    def expected(self, rows: int, cols: int, parts: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        group = self.group if self.group in INT4_GROUPS and cols % self.group == 0 else cols
        dtype = self.scales.dtype if self.scales.dtype in PLAIN else torch.bfloat16
        grid = rows, cols // group
        return {"codes": ((rows, cols // 2), torch.uint8), "scales": (grid, dtype), "zeros": (grid, torch.uint8)}


@dataclass(frozen=True)
class Mxfp8(Matrix):
    """OCP MXFP8: `data` e4m3 [L, rows, cols], `scales` u8 E8M0 [L, rows, cols/32]."""

    data: torch.Tensor
    scales: torch.Tensor
    format = ("mxfp8",)
    whole_columns = MX_BLOCK

    def expected(self, rows: int, cols: int, parts: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"data": ((rows, cols), torch.float8_e4m3fn), "scales": ((rows, cols // MX_BLOCK), torch.uint8)}


@dataclass(frozen=True)
class ExpertWeights:
    """One rank's share of a layer's experts.

    Attributes:
        gate_up: [L, parts * I', H], rows [gate; up] (or up alone); I' is this rank's slice of I under MoE-TP.
        down: [L, H, I'].
        gate_up_bias: [L, parts * I'] float32 or bf16, or None.
        down_bias: [L, H], whole on every MoE-TP rank; executors add it on moe_tp_rank 0 only. Or None.
        hidden_order: [H] int64: column c of every expert's `gate_up` is for column hidden_order[c] of the hidden
            states, equal on all ranks. The layer sorts its tokens so before they travel. None: they are in order.
    """

    gate_up: Matrix
    down: Matrix
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    hidden_order: torch.Tensor | None = None

    @property
    def num_local_experts(self) -> int:
        return self.gate_up.shape[0]

    @property
    def device(self) -> torch.device:
        return self.gate_up.device

    @property
    def nbytes(self) -> int:
        biases = [bias for bias in (self.gate_up_bias, self.down_bias) if bias is not None]
        return self.gate_up.nbytes + self.down.nbytes + sum(bias.nbytes for bias in biases)

    def order_fingerprint(self) -> str:
        """Returns a short text that differs where `hidden_order` does."""
        order = self.hidden_order
        return "none" if order is None else hashlib.sha256(repr(order.tolist()).encode()).hexdigest()[:16]

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ExpertWeights:
        """Returns a copy with every expert's tensors changed (moved, sliced along L)."""
        bias = [None if b is None else change(b) for b in (self.gate_up_bias, self.down_bias)]
        return ExpertWeights(self.gate_up.map(change), self.down.map(change), bias[0], bias[1], self.hidden_order)

    def to(self, device: torch.device | str) -> ExpertWeights:
        return self.map(lambda tensor: tensor.to(device))

    def check(self, config: MoEConfig, shard: ExpertShard) -> None:
        """Raises ConfigError naming the tensor unless shapes, dtypes and format are the config's for this shard."""
        given: dict[str, object] = {"gate_up": self.gate_up, "down": self.down}
        for name, matrix in given.items():
            if not isinstance(matrix, Matrix):
                raise ConfigError(f"{name} is {type(matrix).__name__}: expected a matrix type of eprt.weights")
            if config.weight_format not in matrix.format:
                raise ConfigError(
                    f"{name} is {type(matrix).__name__}: the config's weight_format is {config.weight_format!r}"
                )
        width = shard.slice_intermediate(config.intermediate_size)
        intermediate, parts = width.stop - width.start, config.activation.parts
        L, H, rows = shard.num_local_experts, config.hidden_size, parts * intermediate
        order: object = self.hidden_order
        right = isinstance(order, torch.Tensor) and order.dtype == torch.int64 and not order.is_meta
        if order is not None and not (right and torch.equal(order.sort().values.cpu(), torch.arange(H, device="cpu"))):
            raise ConfigError(f"hidden_order: expected each of {H} columns of the hidden states once, in int64")
        self.gate_up.check("gate_up", L, rows, H, parts)
        self.down.check("down", L, H, intermediate, 1)
        _check_dense("gate_up_bias", self.gate_up_bias, (L, rows) if config.bias else None)
        _check_dense("down_bias", self.down_bias, (L, H) if config.bias else None)


@dataclass(frozen=True)
class SharedExpertWeights:
    """The dense expert that every token visits: whole on every rank, plain numbers.

    Attributes:
        up: [I_shared, H_model].
        down: [H_model, I_shared].
        gate: [I_shared, H_model] where its activation is gated, else None.
        output_gate: [1, H_model] where the output is scaled by sigmoid(x @ output_gate.T) (Qwen3.5), else None.
    """

    up: torch.Tensor
    down: torch.Tensor
    gate: torch.Tensor | None = None
    output_gate: torch.Tensor | None = None

    def check(self, config: MoEConfig) -> None:
        """Raises ConfigError naming the tensor unless the config's are there, all bf16 or all float32."""
        shared, H = config.shared, config.input_size
        if shared is None:
            raise ConfigError("shared weights are given: the config has no shared expert")
        I = shared.intermediate_size
        _check_dense("shared.up", self.up, (I, H), self.up)
        _check_dense("shared.down", self.down, (H, I), self.up)
        _check_dense("shared.gate", self.gate, (I, H) if shared.activation.gated else None, self.up)
        _check_dense("shared.output_gate", self.output_gate, (1, H) if shared.gate else None, self.up)


@dataclass(frozen=True)
class LatentWeights:
    """Projections into and out of the width the experts live in (Nemotron-H): whole on every rank, plain numbers.

    Attributes:
        into: [H, H_model], applied before dispatch; `into_bias` [H] or None.
        out_of: [H_model, H], applied after combine; `out_of_bias` [H_model] or None.
    """

    into: torch.Tensor
    out_of: torch.Tensor
    into_bias: torch.Tensor | None = None
    out_of_bias: torch.Tensor | None = None

    def check(self, config: MoEConfig) -> None:
        """Raises ConfigError naming the tensor unless the shapes are the config's, all bf16 or all float32."""
        H, H_model = config.hidden_size, config.input_size
        _check_dense("latent.into", self.into, (H, H_model), self.into)
        _check_dense("latent.out_of", self.out_of, (H_model, H), self.into)
        for name, bias, rows in (("into", self.into_bias, H), ("out_of", self.out_of_bias, H_model)):
            _check_dense(f"latent.{name}_bias", bias, None if bias is None else (rows,), self.into)


def _check_dense(name: str, found: object, shape: tuple[int, ...] | None, first: torch.Tensor | None = None) -> None:
    """Raises ConfigError unless `found` is there as `shape` says (None: not at all), in the dtype of the `first`."""
    if shape is None and found is None:
        return
    if shape is None:
        problem = "given: the config has none"
    elif not isinstance(found, torch.Tensor):
        problem = f"{'missing' if found is None else type(found).__name__}: expected a tensor {shape}"
    elif tuple(found.shape) != shape:
        problem = f"{tuple(found.shape)}: the config says {shape}"
    elif found.is_meta:
        problem = "on the meta device, which holds no numbers: load the weights first"
    elif found.dtype not in PLAIN:
        problem = f"{found.dtype}: expected bfloat16 or float32, as the tokens have"
    elif first is not None and found.dtype != first.dtype:
        problem = f"{found.dtype}: expected {first.dtype}, as the others; use .to({first.dtype})"
    else:
        return
    raise ConfigError(f"{name} is {problem}")
