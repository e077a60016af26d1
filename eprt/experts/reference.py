"""The witness: experts in plain torch and float32, written from the formats' definitions.

Nothing here is shared with `eprt.quant` or with another executor: a mistake there can't hide behind the same mistake
here. It is meant to be read, not to be fast. On a GPU it synchronises.

Sources of the formulas: OCP Microscaling Formats v1.0 (E2M1, E4M3: section 5.3; E8M0: section 5.4; MX value =
scale * element: section 5.1); NVFP4: the E4M3 scale of 16 elements and a float32 scale of the matrix, as NVIDIA's
ModelOpt stores them; FP8 blocks of 128 x 128: DeepSeek-V3's checkpoints. Activations: see `eprt.config.Activation`.
"""

from __future__ import annotations

import math

import torch

from eprt.config import Activation, MoEConfig
from eprt.errors import ConfigError
from eprt.experts.base import PreparedExecutor, present
from eprt.tokens import ExpertMajorTokens, FlatTokens, Payload
from eprt.weights import Dense, ExpertWeights, Fp8Block, Fp8Channel, Fp8Tensor, Int4, Matrix, Mxfp4, Mxfp8, Nvfp4

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def _e4m3(byte: int) -> float:
    """Sign, 4 exponent bits (bias 7, 0 is subnormal), 3 mantissa bits; no infinities, S.1111.111 is NaN."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, (byte >> 3) & 0xF, byte & 0x7
    if exponent == 0xF and mantissa == 0x7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


INT4 = tuple(float(code) for code in range(16))
E4M3 = tuple(_e4m3(byte) for byte in range(256))
E8M0 = (*(2.0 ** (byte - 127) for byte in range(255)), float("nan"))


def _look_up(table: tuple[float, ...], tensor: torch.Tensor) -> torch.Tensor:
    """float32 values of a tensor of bytes."""
    return torch.tensor(table, dtype=torch.float32, device=tensor.device)[tensor.view(torch.uint8).long()]


def _nibbles(packed: torch.Tensor, table: tuple[float, ...] = E2M1) -> torch.Tensor:
    """Values of packed bytes: column 2i is the low nibble of byte i, column 2i + 1 the high one."""
    values = packed.new_empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=torch.float32)
    values[..., 0::2] = _look_up(table, packed % 16)
    values[..., 1::2] = _look_up(table, packed // 16)
    return values


def _repeat(scale: torch.Tensor, times: int, dim: int, size: int) -> torch.Tensor:
    """One scale for each of `times` neighbours along `dim`, cut to `size` of them."""
    return scale.repeat_interleave(times, dim).narrow(dim, 0, size)


def decode_matrix(matrix: Matrix, parts: int) -> torch.Tensor:
    """float32 [L, rows, cols] of a canonical matrix. Raises ConfigError for an unknown type."""
    _, rows, cols = matrix.shape
    part_rows = rows // parts
    if isinstance(matrix, Dense):
        # Never the caller's memory, nor its strides: experts may be moved.
        return matrix.data.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if isinstance(matrix, Mxfp4 | Mxfp8):
        values = _nibbles(matrix.codes) if isinstance(matrix, Mxfp4) else _look_up(E4M3, matrix.data)
        return values * _repeat(_look_up(E8M0, matrix.scales), 32, 2, cols)
    if isinstance(matrix, Nvfp4):
        scale = _repeat(_look_up(E4M3, matrix.scales), 16, 2, cols)
        return _nibbles(matrix.codes) * scale * _repeat(matrix.global_scale, part_rows, 1, rows)[:, :, None]
    if isinstance(matrix, Fp8Tensor):
        return _look_up(E4M3, matrix.data) * _repeat(matrix.scale, part_rows, 1, rows)[:, :, None]
    if isinstance(matrix, Fp8Channel):
        return _look_up(E4M3, matrix.data) * matrix.scale[:, :, None]
    if isinstance(matrix, Int4):
        zeros = torch.full_like(matrix.scales, 8.0) if matrix.zeros is None else matrix.zeros
        zero, scale = (_repeat(t.float(), cols // t.shape[2], 2, cols) for t in (zeros, matrix.scales))
        return (_nibbles(matrix.codes, INT4) - zero) * scale
    if isinstance(matrix, Fp8Block):
        scale = torch.cat([_repeat(grid, 128, 1, part_rows) for grid in matrix.scale.chunk(parts, dim=1)], dim=1)
        return _look_up(E4M3, matrix.data) * _repeat(scale, 128, 2, cols)
    raise ConfigError(f"{type(matrix).__name__} isn't a matrix type of eprt.weights")


def decode_hidden(payload: Payload) -> torch.Tensor:
    """float32 [..., H] of a payload."""
    H = payload.hidden_size
    if payload.scale is None:
        return payload.data.float()
    if payload.format == "fp8_block":
        return _look_up(E4M3, payload.data) * _repeat(payload.scale, 128, payload.scale.dim() - 1, H)
    if payload.global_scale is None:
        raise ConfigError("nvfp4 payload carries no global_scale")
    scale = _repeat(_look_up(E4M3, payload.scale), 16, payload.scale.dim() - 1, H)
    return _nibbles(payload.data) * scale * payload.global_scale


def expert_forward(
    config: MoEConfig,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    x: torch.Tensor,
) -> torch.Tensor:
    """One expert: float32 [rows, H] -> [rows, H]. `gate_up` is [parts * I, H], `down` [H, I], biases as wide as rows.

    swiglu: g = min(gate, limit), u = clamp(up, -limit, limit), down @ (g * sigmoid(alpha * g) * (u + beta)).
    geglu: down @ (gelu(gate) * up). relu2: down @ relu(up) ** 2.
    """
    hidden = x @ gate_up.T
    if gate_up_bias is not None:
        hidden = hidden + gate_up_bias.float()
    hidden = activation_forward(config.activation, hidden)
    output = hidden @ down.T
    return output if down_bias is None else output + down_bias.float()


def activation_forward(activation: Activation, hidden: torch.Tensor) -> torch.Tensor:
    """[rows, parts * I] float32, halves [gate; up] -> [rows, I]."""
    if activation.kind == "relu2":
        return torch.relu(hidden) ** 2
    gate, up = hidden.chunk(2, dim=-1)
    if activation.kind == "geglu":  # GELU's tanh approximation: Hendrycks and Gimpel, arXiv 1606.08415
        return 0.5 * gate * (1 + torch.tanh((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.beta)


class ReferenceExecutor(PreparedExecutor):
    """Decodes every expert to float32 once, then loops over the local experts."""

    strided = True

    def _prepare(self, weights: ExpertWeights) -> None:
        weights = weights.to(self.device)
        self._gate_up = decode_matrix(weights.gate_up, self.config.activation.parts)
        self._down = decode_matrix(weights.down, 1)
        self._gate_up_bias, self._down_bias = (
            None if bias is None else bias.clone(memory_format=torch.contiguous_format)
            for bias in (weights.gate_up_bias, weights.down_bias)
        )

    def slot_tensors(self) -> dict[str, torch.Tensor]:
        return present(
            gate_up=self._gate_up, down=self._down, gate_up_bias=self._gate_up_bias, down_bias=self._down_bias
        )

    def _expert(self, index: int, x: torch.Tensor) -> torch.Tensor:
        bias = [None if b is None else b[index] for b in (self._gate_up_bias, self._down_bias)]
        # A product of several rows may sum in another order than one of one row does.
        some = x.split(1) if self.runtime.batch_invariant and len(x) > 1 else (x,)
        matrices = self._gate_up[index], self._down[index]
        return torch.cat([expert_forward(self.config, *matrices, bias[0], bias[1], part) for part in some])

    def _flat(self, tokens: FlatTokens, out: torch.Tensor) -> None:
        hidden = decode_hidden(tokens.hidden)
        total = torch.zeros_like(hidden)
        for index in range(self.shard.num_local_experts):
            chosen = tokens.ids == self.shard.first_expert + index
            rows = chosen.any(dim=1).nonzero()[:, 0]
            weight = torch.where(chosen, tokens.weights, 0.0).sum(dim=1)
            total[rows] += weight[rows, None] * self._expert(index, hidden[rows])
        local = (tokens.ids >= self.shard.first_expert) & (tokens.ids < self.shard.end_expert)
        written = torch.ones_like(local[:, 0]) if tokens.every_row_read else local.any(dim=1)
        out[written] = total[written].to(out.dtype)

    def _expert_major(self, tokens: ExpertMajorTokens, out: torch.Tensor) -> None:
        hidden = decode_hidden(tokens.hidden)
        for index, count in enumerate(tokens.counts.tolist()):
            out[index, :count] = self._expert(index, hidden[index, :count]).to(out.dtype)
