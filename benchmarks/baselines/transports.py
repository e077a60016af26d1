"""Baselines of eprt's dispatchers: the same bytes through raw collectives, and the libraries called directly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from eprt.config import MoEConfig
from eprt.dispatch import DISPATCHERS
from eprt.dispatch.deepep import least_capacity
from eprt.errors import UnsupportedError
from eprt.tokens import TopK
from eprt.world import World

Call = Callable[[], object]


@dataclass(frozen=True)
class TransportBaseline:
    """One way to send tokens to experts and back without eprt.

    Attributes:
        make: (world, config, hidden [T, H], topk) -> a context that yields the call to measure, a round trip.
        sums: whether the call returns x * sum(weights), which can be checked.
    """

    devices: tuple[str, ...]
    make: Callable[[World, MoEConfig, torch.Tensor, TopK], AbstractContextManager[Call]]
    sums: bool = False


@contextmanager
def _collectives(world: World, config: MoEConfig, hidden: torch.Tensor, topk: TopK) -> Iterator[Call]:
    """Runs all-gather of the tokens and reduce-scatter of as many rows; no routing travels."""
    gathered = hidden.new_empty((world.size * hidden.shape[0], hidden.shape[1]))
    summed = torch.empty_like(hidden)

    def call() -> None:
        dist.all_gather_into_tensor(gathered, hidden, group=world.group)
        dist.reduce_scatter_tensor(summed, gathered, group=world.group)

    yield call


@contextmanager
def _flashinfer(world: World, config: MoEConfig, hidden: torch.Tensor, topk: TopK) -> Iterator[Call]:
    """Runs the library's own class; combine reads the rows in its workspace."""
    _require("flashinfer")
    from flashinfer.comm.mapping import Mapping
    from flashinfer.comm.mnnvl import MnnvlConfig, TorchDistBackend
    from flashinfer.comm.trtllm_moe_alltoall import MoeAlltoAll

    E, K, (T, H), W = config.num_experts, config.top_k, hidden.shape, world.size
    mapping = Mapping(world_size=W, rank=world.rank, gpus_per_node=W, tp_size=W, moe_ep_size=W, moe_tp_size=1)
    exchange: Any = MoeAlltoAll(
        mapping,
        T,
        K,
        E,
        workspace_size_per_rank=MoeAlltoAll.get_moe_workspace_size_per_rank(W, K, T, H),
        mnnvl_config=MnnvlConfig(comm_backend=TorchDistBackend()),
    )

    def call() -> object:
        exchange._state.phase = "idle"
        payloads = [hidden, topk.ids, topk.weights]
        exchange.dispatch(topk.ids, payloads, T, invalid_token_expert_id=E, expert_id_payload_index=1)
        rows = exchange.get_combine_payload_tensor_in_workspace(T, H, torch.bfloat16)
        return exchange.combine(rows, T, payload_in_workspace=True)

    yield call


@contextmanager
def _deepep(world: World, config: MoEConfig, hidden: torch.Tensor, topk: TopK) -> Iterator[Call]:
    """Runs the library's low-latency buffer, with what it leaves to its user in every call.

    That is ids in its own type, and tokens of a hidden size that it lacks padded before and trimmed after. Combine gets
    the padded rows as they arrived.
    """
    _require("deepep")
    import deep_ep

    spec = DISPATCHERS["deepep"]
    E, (T, H), width = config.num_experts, hidden.shape, spec.padded_hidden(config.hidden_size)
    if spec.max_tokens is not None and spec.max_tokens < T:
        raise UnsupportedError(f"at most {spec.max_tokens} tokens per rank")
    most = least_capacity(world.size, T)
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(most, width, world.size, E)
    buffer: Any = deep_ep.Buffer(
        world.group,
        0,
        size,
        low_latency_mode=True,
        num_qps_per_rank=E // world.size,
        allow_nvlink_for_low_latency_mode=True,
        explicitly_destroy=True,
    )

    def call() -> object:
        x = hidden if width == H else torch.nn.functional.pad(hidden, (0, width - H))
        ids = topk.ids.to(deep_ep.topk_idx_t)
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, most, E, use_fp8=False)
        summed = buffer.low_latency_combine(rows, ids, topk.weights, handle)[0]
        return summed if width == H else summed[:, :H].contiguous()

    try:
        yield call
    finally:
        torch.cuda.synchronize()
        buffer.destroy()


TRANSPORTS: dict[str, TransportBaseline] = {
    "collectives by hand": TransportBaseline(("cpu", "cuda"), _collectives),
    "flashinfer by hand": TransportBaseline(("cuda",), _flashinfer),
    "deepep by hand": TransportBaseline(("cuda",), _deepep, sums=True),
}


def _require(dispatcher: str) -> None:
    requirement = DISPATCHERS[dispatcher].requirement
    if requirement is not None and not (found := requirement.check()):
        raise UnsupportedError(found.reason)
