"""gpt-oss: top-k-then-softmax routing, biases, clamped SwiGLU with alpha; MXFP4 blocks or bf16.

Both formats interleave the rows of gate and up (g0, u0, g1, u1, ...). MXFP4 stores `[E, out, in/32, 16]` bytes, a
block of 32 values in 16, and bf16 the transposed `[E, in, out]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from eprt.config import Activation, MoEConfig, Routing
from eprt.errors import ConfigError
from eprt.models.base import ModelFamily
from eprt.models.checkpoint import Checkpoint
from eprt.models.formats import e8m0_scale
from eprt.models.hf_config import check_moe_layer, expect, integer, num_layers, real, weight_format
from eprt.placement import ExpertShard
from eprt.weights import MX_BLOCK, Dense, ExpertWeights, Matrix, Mxfp4

Side = Literal["gate_up_proj", "down_proj"]


class GptOss(ModelFamily):
    """openai/gpt-oss-20b, -120b."""

    routers = ("router",)
    returns_scores = True

    def moe_layers(self, hf: dict[str, Any]) -> list[int]:
        return list(range(num_layers(hf)))

    def moe_config(self, hf: dict[str, Any], layer: int) -> MoEConfig:
        check_moe_layer(layer, self.moe_layers(hf))
        expect(hf, "hidden_act", "silu")
        return MoEConfig(
            num_experts=integer(hf, "num_local_experts", "num_experts"),
            top_k=integer(hf, "num_experts_per_tok", "experts_per_token"),
            hidden_size=integer(hf, "hidden_size"),
            intermediate_size=integer(hf, "intermediate_size"),
            # The hub's configs give the limit but not alpha, which is a constant of the published model code.
            activation=Activation(
                alpha=real(hf, "swiglu_alpha", default=1.702), beta=1.0, limit=real(hf, "swiglu_limit", default=7.0)
            ),
            routing=Routing("topk_softmax"),
            bias=True,
            weight_format=weight_format(hf, self.expert_modules(layer)),
        )

    def load_experts(self, checkpoint: Checkpoint, layer: int, config: MoEConfig, shard: ExpertShard) -> ExpertWeights:
        prefix = f"{self.block(checkpoint, layer)}.experts"
        reader = _Reader(checkpoint, prefix, config, shard)
        weights = ExpertWeights(
            reader.matrix("gate_up_proj"), reader.matrix("down_proj"), reader.gate_up_bias(), reader.down_bias()
        )
        weights.check(config, shard)
        return weights


class _Reader:
    """One layer's experts, one rank's share; one expert at a time, so that no second copy of the layer exists."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: MoEConfig, shard: ExpertShard) -> None:
        self.checkpoint = checkpoint
        self.prefix = prefix
        self.config = config
        self.experts = shard.experts
        self.width = shard.slice_intermediate(config.intermediate_size)
        # gate and up rows alternate, so this rank's rows of both are one range.
        self.both = slice(2 * self.width.start, 2 * self.width.stop)

    def matrix(self, side: Side) -> Matrix:
        if self.config.weight_format == "mxfp4":
            return Mxfp4(self._stack(side, self._codes), self._stack(side, self._scales))
        if self.config.weight_format in ("bf16", "f32"):
            return Dense(self._stack(side, self._plain))
        raise ConfigError(f"gpt-oss experts in {self.config.weight_format} are not supported: expected mxfp4 or bf16")

    def gate_up_bias(self) -> torch.Tensor:
        rows = 2 * self.config.intermediate_size
        bias = self._biases("gate_up_proj_bias", rows, self.both)
        return torch.cat((bias[:, 0::2], bias[:, 1::2]), dim=1)

    def down_bias(self) -> torch.Tensor:
        return self._biases("down_proj_bias", self.config.hidden_size, slice(None))

    def _biases(self, name: str, cols: int, take: slice) -> torch.Tensor:
        """The taken ones of [L, cols], the local experts'."""
        dtypes = (torch.bfloat16, torch.float32)
        return torch.stack([self._read(name, (expert, take), (cols,), dtypes) for expert in self.experts])

    def _stack(self, side: Side, read: Callable[[Side, int], torch.Tensor]) -> torch.Tensor:
        """[L, rows, ...] in canonical order, from `read(side, expert)` of [rows, ...] in the checkpoint's."""
        out: torch.Tensor | None = None
        for row, expert in enumerate(self.experts):
            found = read(side, expert)
            if out is None:
                out = found.new_empty((len(self.experts), *found.shape))
            if side == "gate_up_proj":
                half = found.shape[0] // 2
                out[row, :half] = found[0::2]
                out[row, half:] = found[1::2]
            else:
                out[row] = found
        if out is None:
            raise ConfigError("this rank holds no experts: expected at least one")
        return out

    def _codes(self, side: Side, expert: int) -> torch.Tensor:
        rows, cols, (take_rows, blocks) = self._blocks(side)
        shape = (rows, cols // MX_BLOCK, MX_BLOCK // 2)
        return self._read(f"{side}_blocks", (expert, take_rows, blocks), shape, (torch.uint8,)).flatten(1)

    def _scales(self, side: Side, expert: int) -> torch.Tensor:
        rows, cols, (take_rows, blocks) = self._blocks(side)
        name = f"{side}_scales"
        scales = self._read(name, (expert, take_rows, blocks), (rows, cols // MX_BLOCK), (torch.uint8,))
        return e8m0_scale(scales, self.checkpoint.where(f"{self.prefix}.{name}"))

    def _plain(self, side: Side, expert: int) -> torch.Tensor:
        rows, cols, (take_rows, take_cols) = self._size(side)
        dtype = torch.float32 if self.config.weight_format == "f32" else torch.bfloat16
        return self._read(side, (expert, take_cols, take_rows), (cols, rows), (dtype,)).T

    def _size(self, side: Side) -> tuple[int, int, tuple[slice, slice]]:
        """Rows and columns of the whole matrix, and the rows and columns of it that this rank holds."""
        H, I = self.config.hidden_size, self.config.intermediate_size
        if side == "gate_up_proj":
            return 2 * I, H, (self.both, slice(0, H))
        return H, I, (slice(0, H), self.width)

    def _blocks(self, side: Side) -> tuple[int, int, tuple[slice, slice]]:
        """As `_size`, the taken columns counted in blocks of 32."""
        rows, cols, (take_rows, take_cols) = self._size(side)
        if cols % MX_BLOCK or take_cols.start % MX_BLOCK or take_cols.stop % MX_BLOCK:
            raise ConfigError(
                f"{side}: columns [{take_cols.start}, {take_cols.stop}) of {cols} cut an MXFP4 block of {MX_BLOCK}; "
                "choose a moe_tp_size that keeps blocks whole"
            )
        return rows, cols, (take_rows, slice(take_cols.start // MX_BLOCK, take_cols.stop // MX_BLOCK))

    def _read(
        self, name: str, index: tuple[int | slice, ...], shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
    ) -> torch.Tensor:
        full = (self.config.num_experts, *shape)
        return self.checkpoint.read(f"{self.prefix}.{name}", index, shape=full, dtypes=dtypes)
