"""torch's own grouped GEMM: the executor of unquantised checkpoints, on CPU and CUDA.

FlatTokens are sorted by expert, entries without a local expert left out; the GEMM's offsets end with the last row.
Shapes depend on N, K and L only and nothing is read back to the host, so a call can be captured in a CUDA graph.

`grouped_mm` keeps that promise on CPU and, on CUDA, for bf16 on compute capability 9.x and 10.x. Elsewhere (float32,
other GPUs) it copies the offsets to the host and loops over the experts (ATen/native/cuda/GroupedBlas.cpp, torch 2.10
to 2.13), so there a batched GEMM runs every local expert on every row: L/K times the work, still without a sync.
"""

from __future__ import annotations

import torch
from torch.nn.functional import grouped_mm, pad

from eprt.activation import activated
from eprt.experts.base import PreparedExecutor, present
from eprt.experts.padding import pad_parts, stack_experts
from eprt.experts.permute import group_rows, weighted_unpermute
from eprt.quant import decode, decode_payload
from eprt.rounding import round_up
from eprt.tokens import ExpertMajorTokens, FlatTokens
from eprt.weights import ExpertWeights, Matrix

# grouped_mm wants rows whose stride is a multiple of 16 bytes. On CPUs with AMX, bf16 products of torch 2.11 whose
# inner size isn't a multiple of 32 read into the next row: its NaN, which may be garbage, then spoils this one.
ALIGNMENT = 32
CHUNK = 1 << 21  # float32 values at a time: 8 MB, which stay in a GPU's L2 from one operation to the next


def _aligned(size: int) -> int:
    return round_up(size, ALIGNMENT)


def has_grouped_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether `grouped_mm` runs without a host sync there."""
    if device.type == "cpu":
        return True
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in (9, 10)


class GroupedExecutor(PreparedExecutor):
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
        # Padded like the matrices' rows.
        self._gate_up_bias = self._load_bias(weights.gate_up_bias, parts)
        self._down_bias = self._load_bias(weights.down_bias, 1)
        self._experts = torch.arange(L, dtype=torch.int32, device=self.device)

    def _load(self, matrix: Matrix, parts: int) -> torch.Tensor:
        """[L, rows, cols], each part's rows and the columns padded with zeros, decoded expert by expert."""
        L, rows, cols = matrix.shape

        def one(index: int) -> dict[str, torch.Tensor]:
            own = matrix.expert(index).map(lambda tensor: tensor.to(self.device))
            return {"": pad_parts(decode(own, parts, self._dtype), parts, _aligned(rows // parts), _aligned(cols))}

        return stack_experts(L, one)[""]

    def _load_bias(self, bias: torch.Tensor | None, parts: int) -> torch.Tensor | None:
        if bias is None:
            return None
        return pad_parts(bias.to(self.device, torch.float32), parts, _aligned(bias.shape[1] // parts))

    def slot_tensors(self) -> dict[str, torch.Tensor]:
        return present(
            gate_up=self._gate_up, down=self._down, gate_up_bias=self._gate_up_bias, down_bias=self._down_bias
        )

    def _aligned_hidden(self, tokens: FlatTokens | ExpertMajorTokens) -> torch.Tensor:
        hidden = decode_payload(tokens.hidden).to(self._dtype)
        return pad(hidden, (0, self._hidden_pad)) if self._hidden_pad else hidden

    def _flat(self, tokens: FlatTokens, out: torch.Tensor) -> None:
        hidden = self._aligned_hidden(tokens)
        if self._grouped:
            self._sorted(hidden, tokens, out)
        else:
            out.copy_(self._dense(hidden, tokens)[:, : self.config.hidden_size])

    def _expert_major(self, tokens: ExpertMajorTokens, out: torch.Tensor) -> None:
        # A row of the result depends on the same row of the tokens alone: garbage rows stay among themselves.
        rows = self._batched(self._aligned_hidden(tokens))[..., : self.config.hidden_size]
        if self._down_bias is None:
            out.copy_(rows)
        else:
            torch.add(rows, self._down_bias[:, None, : self.config.hidden_size], out=out)

    def _sorted(self, hidden: torch.Tensor, tokens: FlatTokens, out: torch.Tensor) -> None:
        """Each (row, slot) computed by its expert alone, weighted, summed over K."""
        first, L = self.shard.first_expert, self.shard.num_local_experts
        rows, order = group_rows(hidden.contiguous(), tokens.ids, first, L, self._dtype)
        ends = order.offsets[1:].to(torch.int32)
        bias = self._gate_up_bias
        expert = None
        if bias is not None:  # rows past the last one's are garbage, with any expert's bias
            row = torch.arange(rows.shape[0], device=rows.device)
            expert = torch.bucketize(row, order.offsets[1:], right=True).clamp_(max=L - 1)
        rows = self._activated(self._grouped_mm(rows, self._gate_up, ends), expert)
        rows = self._grouped_mm(rows, self._down, ends)
        if self._down_bias is None and out.is_contiguous() and not self._hidden_pad:
            weighted_unpermute(rows, order, tokens.weights, out, every_row=True)
            return
        total = torch.empty(hidden.shape, dtype=torch.float32, device=hidden.device)
        weighted_unpermute(rows, order, tokens.weights, total, every_row=True)
        if self._down_bias is not None:
            local = self._local_ids(tokens).long()
            weights = torch.where(local < L, tokens.weights, 0.0)
            share = weights.new_zeros((len(local), L + 1)).scatter_add_(1, local, weights)
            if self.runtime.batch_invariant:
                for expert in range(L):
                    total += share[:, expert, None] * self._down_bias[expert]
            else:
                total.addmm_(share[:, :L], self._down_bias)
        out.copy_(total[:, : self.config.hidden_size])

    def _grouped_mm(self, rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """[rows, cols of a matrix] by expert -> [rows, rows of a matrix]; `ends` [L] are the experts' last rows."""
        if not self.runtime.batch_invariant:
            return grouped_mm(rows, matrices.mT, offs=ends)
        # A product of one row is the same whatever its neighbours are; CPU kernels for several rows aren't.
        out = rows.new_zeros((rows.shape[0], matrices.shape[1]))
        first = 0
        for matrix, end in zip(matrices, ends.tolist(), strict=True):
            for row in range(first, end):
                torch.mv(matrix, rows[row], out=out[row])
            first = end
        return out

    def _dense(self, hidden: torch.Tensor, tokens: FlatTokens) -> torch.Tensor:
        """[N, H] float32: every local expert on every row, then each row's own experts summed with their weights."""
        chosen = self._local_ids(tokens)[None] == self._experts[:, None, None]
        weights = torch.where(chosen, tokens.weights, 0.0).sum(2, keepdim=True)
        rows = self._batched(hidden.expand(self.shard.num_local_experts, *hidden.shape)).float()
        if self._down_bias is not None:
            rows += self._down_bias[:, None]
        return torch.where(chosen.any(2, keepdim=True), rows * weights, 0.0).sum(0)

    def _batched(self, hidden: torch.Tensor) -> torch.Tensor:
        """[L, M, H] -> [L, M, H], block e through expert e, the last bias left out."""
        if self.runtime.batch_invariant and hidden.shape[1] > 1:
            return torch.cat([self._batched(row.contiguous()) for row in hidden.split(1, dim=1)], dim=1)
        return torch.bmm(self._activated(torch.bmm(hidden, self._gate_up.mT)), self._down.mT)

    def _activated(self, rows: torch.Tensor, expert: torch.Tensor | None = None) -> torch.Tensor:
        """[rows, parts * I] or [L, M] of them -> as many rows of I, biased and activated in float32, some at a time.

        `expert` [rows] names the expert of each row; block e has e's.
        """
        activation, bias = self.config.activation, self._gate_up_bias
        narrow = rows.new_empty((*rows.shape[:-1], rows.shape[-1] // activation.parts))
        step = max(1, CHUNK // max(1, rows.shape[-1] * (rows.shape[0] if rows.dim() == 3 else 1)))
        for start in range(0, rows.shape[-2], step):
            some = rows.narrow(-2, start, min(step, rows.shape[-2] - start)).float()
            if bias is not None:
                some += bias[:, None] if expert is None else bias.index_select(0, expert[start : start + step])
            gate, up = some.chunk(2, dim=-1) if activation.gated else (None, some)
            narrow.narrow(-2, start, some.shape[-2]).copy_(activated(activation, gate, up))
        return narrow

    def _local_ids(self, tokens: FlatTokens) -> torch.Tensor:
        """[N, K] int32 in [0, L], L for a slot without a local expert."""
        local, L = tokens.ids - self.shard.first_expert, self.shard.num_local_experts
        return torch.where((local >= 0) & (local < L), local, L)
