"""The library under an executor, called directly: the same job, FlatTokens in and [N, H] bf16 out, without eprt.

This is what a user writes who has the library and torch, and nothing else. It computes with the executor's own prepared
weights, kernels and tactics, so only the code around them differs. It can be captured in a CUDA graph: the host reads
nothing, and tables that depend on sizes alone are made once, outside the call.

- `cutlass_mxfp4`: the library's call sorts, weights and sums. The user pads H to tiles of 128 and trims the result.
- `humming`: the library has GEMMs and elementwise kernels only. torch sorts the (token, k) pairs, the library's own
  scatter copies and quantises the rows, and torch's `embedding_bag` reads, weights and sums all K results of a token in
  one kernel. The alternative, GEMMs that read rows by index (`indexed`; vLLM's default), needs each expert's rows
  padded to blocks. humming has no kernel for that: its tests loop on the host, and vLLM brings its own. It would take
  more torch launches than a sort, other schedules would have to be tuned, and the activation would run over all N * K
  rows, of which this rank holds a share.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch.nn import functional

from eprt.config import MoEConfig
from eprt.conformance.oracle import relative_error
from eprt.errors import EprtError
from eprt.experts import Executor
from eprt.experts.cutlass_mxfp4 import CutlassMxfp4Executor
from eprt.experts.humming import HummingExecutor
from eprt.experts.permute import plain_hidden
from eprt.placement import ExpertShard
from eprt.tokens import FlatTokens
from eprt.weights import Dense, ExpertWeights

BOUND = 1e-2  # relative norm: sums in another order, routing weights in bf16

Call = Callable[[], torch.Tensor]
# Lays weights out as a library's users would, and yields a function from tokens to a call.
Make = Callable[
    [MoEConfig, ExpertShard, ExpertWeights, torch.device], AbstractContextManager[Callable[[FlatTokens], Call]]
]


def dense(weights: ExpertWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns gate_up and down in bf16. Raises EprtError for any other format."""
    if not isinstance(weights.gate_up, Dense) or not isinstance(weights.down, Dense):
        raise EprtError("this library is measured with bf16 weights")
    return weights.gate_up.data, weights.down.data


def direct_call(executor: Executor, tokens: FlatTokens) -> Call | None:
    """Returns the same job on the same tensors without eprt; None if no library is behind the executor."""
    if isinstance(executor, CutlassMxfp4Executor):
        return _cutlass(executor, tokens)
    if isinstance(executor, HummingExecutor):
        return _humming(executor, tokens)
    return None


def check_direct(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises EprtError unless both results are equal but for rounding: otherwise their times can't be compared."""
    if not (error := relative_error(found, expected)) <= BOUND:
        raise EprtError(
            f"the library called directly differs from the executor by {error:.3g} in norm: at most {BOUND:g} may be "
            "rounding, so there is nothing to compare times with"
        )


def _cutlass(executor: CutlassMxfp4Executor, tokens: FlatTokens) -> Call:
    hidden, H = plain_hidden(tokens.hidden), executor.config.hidden_size
    missing = executor._hidden - H

    def call() -> torch.Tensor:
        rows = hidden.to(torch.bfloat16)
        padded = functional.pad(rows, (0, missing)) if missing else rows.contiguous()
        out = torch.empty_like(padded)
        executor._run(padded, tokens.ids, tokens.weights, out)
        return out[:, :H].contiguous()

    return call


def _humming(executor: HummingExecutor, tokens: FlatTokens) -> Call:
    hidden, (N, K) = plain_hidden(tokens.hidden), tokens.ids.shape
    order, scatter = TorchOrder((N, K), executor.shard, hidden.device), executor._rows("scatter", scatter_width=K)
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
    """Sorts (token, k) pairs by expert and sums results back, in as few launches of plain torch as we know.

    Args:
        shape: (N, K) of the ids to come.
        shard: the local experts; pairs of any other id are foreign.
    """

    def __init__(self, shape: tuple[int, int], shard: ExpertShard, device: torch.device) -> None:
        (N, K), L = shape, shard.num_local_experts
        self.num_local = L
        self.spare = N * K  # where foreign pairs point: no row of the scatter's, and a row that the sum leaves out
        # int16: the fewer bits a key has, the fewer passes sorting takes.
        self._edges = torch.arange(L + 1, dtype=torch.int16, device=device)
        self._local_expert = torch.full((shard.num_experts + 1,), L, dtype=torch.int16, device=device)
        self._local_expert[shard.first_expert : shard.end_expert] = self._edges[:-1]
        self._pairs = torch.arange(N * K, device=device)
        self._bags = torch.arange(0, N * K, K, device=device)

    def sort(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For ids [N, K] int32 returns offsets [L + 1] int64, pairs' sorted rows [N * K] int64, and foreign pairs."""
        local = self._local_expert.index_select(0, ids.flatten())
        by_expert, order = local.sort(stable=True)
        offsets = torch.searchsorted(by_expert, self._edges)
        place = torch.empty_like(order).scatter_(0, order, self._pairs)
        foreign = local == self.num_local
        return offsets, place.masked_fill_(foreign, self.spare), foreign

    def sum_back(
        self, results: torch.Tensor, place: torch.Tensor, foreign: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Returns [N, H] weighted sums, accumulated in float32.

        `results` has N * K + 1 rows; rows of no local pair may be garbage. So may weights [N, K] of foreign pairs: CUDA
        multiplies them by the zero that it puts for a row left out.
        """
        scales = weights.flatten().to(results.dtype, copy=True).masked_fill_(foreign, 0)
        return functional.embedding_bag(
            place, results, self._bags, mode="sum", per_sample_weights=scales, padding_idx=self.spare
        )
