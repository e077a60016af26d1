"""What eprt's executors are measured beside: the same job, FlatTokens in and [N, H] bf16 out, with the bare library.

A peer is what a user of the library writes who has it and torch, and nothing else. It computes with the executor's own
prepared weights, kernels and tactics, so only what surrounds them differs. It can be captured in a CUDA graph: nothing
is read by the host, and tables that depend on sizes alone are made once, outside.

- `cutlass_mxfp4`: the library's call sorts, weights and sums; by hand are left the padding of H to tiles of 128 and the
  cut of the result.
- `humming`: the library has GEMMs and elementwise kernels only. Slots are sorted by torch, copied to their places and
  quantised by the library's own scatter, summed back by torch's `embedding_bag`, which reads and weights all K results
  of a row in one kernel. The other route, GEMMs that read rows by index (`indexed`; vLLM's default), needs each
  expert's slots padded to blocks. humming has no kernel for that (its tests loop on the host, vLLM brings its own), in
  torch it is more launches than a sort, other schedules would have to be tuned, and the activation would run over all
  N * K rows, of which this rank has a share.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from eprt.errors import EprtError
from eprt.experts import Executor
from eprt.experts.cutlass_mxfp4 import CutlassMxfp4Executor
from eprt.experts.humming import HummingExecutor
from eprt.experts.permute import plain_hidden
from eprt.placement import ExpertShard
from eprt.tokens import FlatTokens

PEER_BOUND = 1e-2  # relative norm: sums in another order, routing weights in bf16

Call = Callable[[], torch.Tensor]


def by_hand(executor: Executor, tokens: FlatTokens) -> Call | None:
    """The same job on the same tensors without eprt, or None where the executor has no library to itself."""
    if isinstance(executor, CutlassMxfp4Executor):
        return _cutlass(executor, tokens)
    if isinstance(executor, HummingExecutor):
        return _humming(executor, tokens)
    return None


def check_peer(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises EprtError unless a peer's result is the executor's: what computes something else is no peer."""
    difference, size = (found.float() - expected.float()).norm().item(), expected.float().norm().item()
    if not difference <= PEER_BOUND * size:
        raise EprtError(
            f"the library by hand differs from the executor by {difference:.3g} in norm, of {size:.3g}: at most "
            f"{PEER_BOUND:g} of it may be rounding, so there is nothing to compare times with"
        )


def _cutlass(executor: CutlassMxfp4Executor, tokens: FlatTokens) -> Call:
    hidden, H = plain_hidden(tokens.hidden), executor.config.hidden_size
    tactic, missing = executor._chosen(tokens.num_rows), executor._hidden - H

    def call() -> torch.Tensor:
        rows = hidden.to(torch.bfloat16)
        padded = functional.pad(rows, (0, missing)) if missing else rows.contiguous()
        out = torch.empty_like(padded)
        executor._run(padded, tokens.ids, tokens.weights, out, tactic)
        return out[:, :H].contiguous()

    return call


def _humming(executor: HummingExecutor, tokens: FlatTokens) -> Call:
    hidden, (N, K) = plain_hidden(tokens.hidden), tokens.ids.shape
    order, scatter = TorchOrder((N, K), executor.shard, hidden.device), executor._rows("scatter", slots=K)
    expected = executor._expected_rows(N)

    def call() -> torch.Tensor:
        offsets, place, foreign = order.sort(tokens.ids)
        plain = hidden.to(torch.bfloat16).contiguous()
        rows, scale = scatter(plain, N * K, scatter_idx=place.view(N, K))
        results = torch.empty(N * K + 1, hidden.shape[1], dtype=torch.bfloat16, device=hidden.device)
        executor._experts(rows, scale, offsets, "grouped_contiguous", expected, results[:-1])
        return order.sum_back(results, place, foreign, tokens.weights)

    return call


class TorchOrder:
    """Slots sorted by expert and results summed back, in as few launches of plain torch as we know.

    Args:
        shape: (N, K) of the ids to come.
        shard: whose experts are local; slots of any other id are foreign.
    """

    def __init__(self, shape: tuple[int, int], shard: ExpertShard, device: torch.device) -> None:
        (N, K), L = shape, shard.num_local_experts
        self.num_local = L
        self.spare = N * K  # where foreign slots point: no row of the scatter's, and a row that the sum leaves out
        # int16: the fewer bits a key has, the fewer passes sorting takes.
        local = torch.arange(L + 1, dtype=torch.int16, device=device)
        self._local_expert = torch.full((shard.num_experts + 1,), L, dtype=torch.int16, device=device)
        self._local_expert[shard.first_expert : shard.end_expert] = local[:-1]
        self._edges = local
        self._slots = torch.arange(N * K, device=device)
        self._bags = torch.arange(0, N * K, K, device=device)

    def sort(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of ids [N, K] int32: offsets [L + 1] int64, sorted place of each slot [N * K] int64, which are foreign."""
        local = self._local_expert.index_select(0, ids.flatten())
        by_expert, order = local.sort(stable=True)
        offsets = torch.searchsorted(by_expert, self._edges)
        place = torch.empty_like(order).scatter_(0, order, self._slots)
        foreign = local == self.num_local
        return offsets, place.masked_fill_(foreign, self.spare), foreign

    def sum_back(
        self, results: torch.Tensor, place: torch.Tensor, foreign: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """[N, H], summed in float32. `results` has N * K + 1 rows, of which those of no local slot may be garbage;
        so may weights [N, K] of foreign slots, by which CUDA multiplies the zero that it puts for a row left out."""
        scales = weights.flatten().to(results.dtype, copy=True).masked_fill_(foreign, 0)
        return functional.embedding_bag(
            place, results, self._bags, mode="sum", per_sample_weights=scales, padding_idx=self.spare
        )
