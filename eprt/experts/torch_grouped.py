"""torch's own grouped GEMM: the executor of unquantised checkpoints, on CPU and CUDA.

FlatTokens are sorted by expert, slots without a local expert last; the GEMM's offsets end before those. Shapes
depend on N, K and L only and nothing is read back to the host, so a call can be captured in a CUDA graph.

`grouped_mm` keeps that promise on CPU and, on CUDA, for bf16 on compute capability 9.x and 10.x. Elsewhere (float32,
other GPUs) it copies the offsets to the host and loops over the experts (ATen/native/cuda/GroupedBlas.cpp, torch 2.10
to 2.13), so there a batched GEMM runs every local expert on every row: L/K times the work, still without a sync.
"""

from __future__ import annotations

import torch
from torch.nn.functional import grouped_mm, pad

from eprt.config import Activation
from eprt.experts.base import Executor
from eprt.quant import decode, decode_payload
from eprt.rounding import round_up
from eprt.slabs import ExpertMajorIndex, weighted_sum_to_flat
from eprt.tokens import ExpertMajorTokens, FlatTokens
from eprt.weights import ExpertWeights, Matrix

# grouped_mm wants rows whose stride is a multiple of 16 bytes. On CPUs with AMX, bf16 products of torch 2.11 whose
# inner size isn't a multiple of 32 read into the next row: its NaN, which may be garbage, then spoils this one.
ALIGNMENT = 32


def _aligned(size: int) -> int:
    return round_up(size, ALIGNMENT)


def has_grouped_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `grouped_mm` runs without a host sync there."""
    if device.type == "cpu":
        return True
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in (9, 10)


def activate(activation: Activation, hidden: torch.Tensor) -> torch.Tensor:
    """[..., parts * I] float32 -> [..., I] float32; the formula of `eprt.config.Activation`. Zeros stay zeros."""
    if not activation.gated:
        return hidden.relu().square()
    gate, up = hidden.chunk(2, dim=-1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return gate * torch.sigmoid(gate * activation.alpha) * (up + activation.beta)


class GroupedExecutor(Executor):
    """Computes in bf16 with float32 accumulation; in float32 throughout if the checkpoint is float32.

    Tokens are converted to that dtype first, quantised weights are decoded to bf16 when they are loaded.
    """

    strided = True

    def _prepare(self, weights: ExpertWeights) -> None:
        config, L = self.config, self.shard.num_local_experts
        self._dtype = torch.float32 if config.weight_format == "f32" else torch.bfloat16
        self._hidden_pad = _aligned(config.hidden_size) - config.hidden_size
        parts = config.activation.parts
        self._gate_up = self._load(weights.gate_up, parts)
        self._down = self._load(weights.down, 1)
        self._grouped = has_grouped_kernel(self.device, self._dtype)
        # Padded like the matrices' rows, with a spare row of zeros for slots that have no local expert.
        self._gate_up_bias = self._load_bias(weights.gate_up_bias, parts)
        self._down_bias = self._load_bias(weights.down_bias if self.shard.moe_tp_rank == 0 else None, 1)
        self._experts = torch.arange(L, dtype=torch.int32, device=self.device)

    def _load(self, matrix: Matrix, parts: int) -> torch.Tensor:
        """[L, rows, cols], each part's rows and the columns padded with zeros, decoded expert by expert."""
        L, rows, cols = matrix.shape
        part_rows = rows // parts
        shape = (L, parts, _aligned(part_rows), _aligned(cols))
        padded = torch.zeros(shape, dtype=self._dtype, device=self.device)
        for index in range(L):
            values = decode(matrix.expert(index).map(lambda tensor: tensor.to(self.device)), parts, self._dtype)
            padded[index, :, :part_rows, :cols] = values.view(parts, part_rows, cols)
        return padded.flatten(1, 2)

    def _load_bias(self, bias: torch.Tensor | None, parts: int) -> torch.Tensor | None:
        if bias is None:
            return None
        split = bias.to(self.device, torch.float32).unflatten(1, (parts, bias.shape[1] // parts))
        return pad(pad(split, (0, -split.shape[2] % ALIGNMENT)).flatten(1, 2), (0, 0, 0, 1))

    def _aligned_hidden(self, tokens: FlatTokens | ExpertMajorTokens) -> torch.Tensor:
        hidden = decode_payload(tokens.hidden).to(self._dtype)
        return pad(hidden, (0, self._hidden_pad)) if self._hidden_pad else hidden

    def _flat(self, tokens: FlatTokens, out: torch.Tensor) -> None:
        hidden = self._aligned_hidden(tokens)
        total = self._sorted(hidden, tokens) if self._grouped else self._dense(hidden, tokens)
        out.copy_(total[:, : self.config.hidden_size])

    def _expert_major(self, tokens: ExpertMajorTokens, out: torch.Tensor) -> None:
        # A row of the result depends on the same row of the slab alone: garbage rows stay among themselves.
        out.copy_(self._batched(self._aligned_hidden(tokens))[..., : self.config.hidden_size])

    def _sorted(self, hidden: torch.Tensor, tokens: FlatTokens) -> torch.Tensor:
        """[N, H] float32: each (row, slot) computed by its expert alone, weighted, summed over K."""
        N, K = tokens.ids.shape
        slot_expert = self._local_ids(tokens).flatten()
        sorted_expert, order = slot_expert.sort(stable=True)
        ends = torch.searchsorted(sorted_expert, self._experts, right=True, out_int32=True)
        rows = hidden.index_select(0, order // K)
        rows = self._biased(grouped_mm(rows, self._gate_up.mT, offs=ends), self._gate_up_bias, sorted_expert)
        rows = activate(self.config.activation, rows).to(self._dtype)
        rows = self._biased(grouped_mm(rows, self._down.mT, offs=ends), self._down_bias, sorted_expert)
        # Rows at and past ends[-1] were never written by the GEMM: the index leaves them out.
        place = torch.empty_like(order).scatter_(0, order, torch.arange(N * K, device=order.device))
        place = torch.where(slot_expert < self.shard.num_local_experts, place, -1)
        return weighted_sum_to_flat(rows[None], ExpertMajorIndex(place.view(N, K), tokens.weights))

    def _dense(self, hidden: torch.Tensor, tokens: FlatTokens) -> torch.Tensor:
        """[N, H] float32: every local expert on every row, then each row's own experts summed with their weights."""
        chosen = self._local_ids(tokens)[None] == self._experts[:, None, None]
        weights = torch.where(chosen, tokens.weights, 0.0).sum(2, keepdim=True)
        rows = self._batched(hidden.expand(self.shard.num_local_experts, *hidden.shape)).float()
        return torch.where(chosen.any(2, keepdim=True), rows * weights, 0.0).sum(0)

    def _batched(self, hidden: torch.Tensor) -> torch.Tensor:
        """[L, M, H] -> [L, M, H], slab e through expert e."""
        rows = self._biased(torch.bmm(hidden, self._gate_up.mT), self._gate_up_bias)
        rows = activate(self.config.activation, rows).to(self._dtype)
        return self._biased(torch.bmm(rows, self._down.mT), self._down_bias)

    def _local_ids(self, tokens: FlatTokens) -> torch.Tensor:
        """[N, K] int32 in [0, L], L for a slot without a local expert."""
        local, L = tokens.ids - self.shard.first_expert, self.shard.num_local_experts
        return torch.where((local >= 0) & (local < L), local, L)

    def _biased(
        self, rows: torch.Tensor, bias: torch.Tensor | None, sorted_expert: torch.Tensor | None = None
    ) -> torch.Tensor:
        """float32 rows plus their expert's bias; `sorted_expert` names the expert of each row, else slab e has e's."""
        rows = rows.float()
        if bias is None:
            return rows
        return rows + (bias[:-1, None] if sorted_expert is None else bias.index_select(0, sorted_expert))
