"""Both token formats from an executor whose kernels take one of them."""

from __future__ import annotations

from dataclasses import replace

import torch

from eprt.expert_major import expert_major_from_flat, flat_from_expert_major, weighted_sum
from eprt.experts.base import Executor, PreparedExecutor, on_dense_slabs
from eprt.tokens import ExpertMajorTokens, FlatTokens


class AdaptedExecutor(Executor):
    """Stands in front of an executor and takes both formats; graph-safe if the inner one is (no host sync).

    The foreign format costs a copy: FlatTokens are laid out as slabs of N rows for each of the L local experts,
    ExpertMajorTokens are handed on as L * M flat rows of one slot and weight 1.

    Args:
        inner: a built executor. The adapter owns nothing else.
    """

    def __init__(self, inner: PreparedExecutor) -> None:
        self.inner = inner
        self.config = inner.config
        self.shard = inner.shard
        self.native_formats = inner.spec.formats
        self.spec = replace(inner.spec, formats=("flat", "expert_major"), takes_logits=None)

    def slot_tensors(self) -> dict[str, torch.Tensor]:
        return self.inner.slot_tensors()

    def warmup(self, max_rows: int, top_k: int | None = None) -> None:
        """For the format that the inner executor doesn't take, in the shape in which it is handed on."""
        if "flat" in self.native_formats:
            self.inner.warmup(max_rows * self.shard.num_local_experts, top_k=1)
        else:
            self.inner.warmup(max_rows)

    def run(self, tokens: FlatTokens | ExpertMajorTokens, out: torch.Tensor) -> None:
        if ("flat" if isinstance(tokens, FlatTokens) else "expert_major") in self.native_formats:
            self.inner(tokens, out)
        elif isinstance(tokens, FlatTokens):
            # Without repeats in a row, no expert can get more than N rows.
            tokens = merge_repeats(tokens)
            laid_out, place = expert_major_from_flat(tokens, self.shard, tokens.num_rows)
            out.copy_(weighted_sum(self.inner(laid_out), place, tokens.weights))
        else:
            on_dense_slabs(self._as_flat, tokens, out)

    def _as_flat(self, tokens: ExpertMajorTokens, out: torch.Tensor) -> None:
        out.copy_(self.inner(flat_from_expert_major(tokens, self.shard)).view_as(out))


def merge_repeats(tokens: FlatTokens) -> FlatTokens:
    """An expert that a row names twice keeps its first slot, with both weights; the other slot becomes invalid."""
    same = tokens.ids[:, :, None] == tokens.ids[:, None, :]
    repeat = same.tril(-1).any(dim=2)
    weights = torch.where(same, tokens.weights[:, None, :], 0.0).sum(dim=2)
    return replace(tokens, ids=torch.where(repeat, tokens.num_experts, tokens.ids), weights=weights)
