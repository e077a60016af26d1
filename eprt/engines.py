"""Engines make a layer's call in place of its dispatcher and its executor: a kernel that chooses the experts by itself,
or one that is dispatch, experts and combine together.

The first row of `ENGINES` that takes a call makes it. The last row, `split`, has no class: it is the layer's own path.
Checks, agreement with the peers and capacity come before an engine, in `agree`. The latent projections, the shared
expert and attention TP are the layer's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.dispatch import Dispatcher
from eprt.errors import UsageError
from eprt.experts.base import Executor, ExecutorSpec
from eprt.routing import Router
from eprt.support import Support, load_class, refuse
from eprt.tokens import Payload, RouterLogits, TopK
from eprt.world import World

# (config in slots, parallel, runtime, chosen executor, whether ids are counted or become ids of slots) -> verdict
EngineRule = Callable[[MoEConfig, ParallelConfig, RuntimeConfig, ExecutorSpec, bool], Support]


@dataclass(frozen=True)
class EngineSpec:
    """Static facts of an engine, for the plan and `eprt explain`; nothing of it is imported to read them.

    Attributes:
        name, path, summary: table key, "module:class" ("": the layer's own path), one line for `eprt explain`.
        rule: whether a layer has calls for it, and which (the reason of a yes) or why none.
    """

    name: str
    path: str
    summary: str
    rule: EngineRule


def _kernel_routed(
    config: MoEConfig, parallel: ParallelConfig, runtime: RuntimeConfig, executor: ExecutorSpec, sees_ids: bool
) -> Support:
    if parallel.world_size > 1:
        return refuse(f"tokens travel in a world of {parallel.world_size}, so their experts are chosen before")
    if executor.takes_logits is None or not executor.takes_logits(config):
        return refuse(f"{executor.name} doesn't choose experts by itself for this layer's routing")
    if sees_ids:
        return refuse("the layer looks at the chosen experts itself: it counts them, or has replicas")
    if (runtime.validate, runtime.payload, runtime.combine_payload) != ("cheap", None, None):
        return refuse("validate='full' and packed tokens need the chosen experts")
    return Support(True, "calls by the layer's own router, or with RouterLogits, on bf16 tokens")


def _split(*_: object) -> Support:
    return Support(True, "every call that no engine before it takes")


ENGINES: dict[str, EngineSpec] = {
    spec.name: spec
    for spec in (
        EngineSpec(
            name="kernel_routed",
            path="eprt.engines:KernelRouted",
            summary="the executor's kernel chooses the experts, nothing travels",
            rule=_kernel_routed,
        ),
        EngineSpec(
            name="split", path="", summary="a dispatcher carries tokens to an executor, and its sums back", rule=_split
        ),
    )
}


class Parts(Protocol):
    """A layer, as its engines know it. They read its parts at each call, as tests and tools may exchange them."""

    config: MoEConfig
    world: World
    dispatcher: Dispatcher
    executor: Executor
    router: Router | None


class Engine(ABC):
    """One way to do a layer's work. State of a call lives in what `begin` returns, never here."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    @abstractmethod
    def takes(self, x: torch.Tensor, choice: TopK | RouterLogits, tokens_per_rank: int | None) -> bool:
        """Returns whether it does this call. Decided without the peers, so only by what is equal on all ranks, or in a
        world of one.

        Args:
            x: [T, H_model] this rank's tokens, checked.
            choice: their experts, or the router's logits; not checked yet.
            tokens_per_rank: as the caller passed it.
        """

    def agree(
        self,
        inside: torch.Tensor,
        choice: TopK | RouterLogits,
        tokens_per_rank: int | None,
        group_tokens: int = 0,
        cut: bool = False,
    ) -> int:
        """Returns R of the call, checked and agreed on with the peers by `Dispatcher.agree`: for every engine whose
        tokens travel."""
        if not isinstance(choice, TopK):
            raise UsageError(f"{type(self).__name__} took router logits and agrees on a TopK: give it an `agree`")
        return self.parts.dispatcher.agree(
            inside, choice, tokens_per_rank, group_tokens=group_tokens, cut=cut, checked=True
        )

    @abstractmethod
    def begin(self, inside: torch.Tensor, choice: TopK | RouterLogits, rows: int) -> Any:
        """Does phase "dispatch": brings tokens to their experts.

        Args:
            inside: [T, H] the tokens of this round, as the experts see them.
            choice: theirs, checked.
            rows: R of this round, at most the capacity.

        Returns:
            the call's state, for the other verbs.
        """

    @abstractmethod
    def compute(self, work: Any) -> torch.Tensor:
        """Does phase "experts"."""

    @abstractmethod
    def finish(self, y: torch.Tensor, work: Any) -> torch.Tensor:
        """Does phase "combine": returns [T, H] weighted sums of this rank's tokens, from what `compute` returned."""

    def close(self, work: Any) -> None:
        """Frees, in a `finally`, what a failed call left. Idempotent."""


class KernelRouted(Engine):
    """In a world of one nothing travels, and an executor that takes logits chooses the experts: no TopK is made."""

    def takes(self, x: torch.Tensor, choice: TopK | RouterLogits, tokens_per_rank: int | None) -> bool:
        """Returns False for what dispatch would refuse, so that it is refused."""
        parts = self.parts
        if not isinstance(choice, RouterLogits) or not parts.executor.takes_logits:
            return False
        logits, capacity = choice.logits, parts.dispatcher.runtime.max_tokens_per_rank
        rows: object = capacity if tokens_per_rank is None else tokens_per_rank
        return (
            not (parts.dispatcher.closed or parts.world.closed)
            and type(rows) is int
            and max(x.shape[0], 1) <= rows <= capacity
            and x.dtype == torch.bfloat16
            and logits.dtype in (torch.bfloat16, torch.float32)
            and (logits.device, logits.layout) == (x.device, torch.strided)
        )

    def agree(self, inside: torch.Tensor, *_: object, **__: object) -> int:
        """Returns R without a check: `takes` has checked, and there are no peers."""
        return max(inside.shape[0], 1)

    def begin(
        self, inside: torch.Tensor, choice: TopK | RouterLogits, rows: int
    ) -> tuple[torch.Tensor, TopK | RouterLogits]:
        return inside, choice

    def compute(self, work: tuple[torch.Tensor, RouterLogits]) -> torch.Tensor:
        inside, choice = work
        router = self.parts.router
        bias = None if router is None else router.correction_bias
        return self.parts.executor.run_logits(Payload.plain(inside), choice.logits, bias)

    def finish(self, y: torch.Tensor, work: tuple[torch.Tensor, RouterLogits]) -> torch.Tensor:
        return y


def make_engines(parts: Parts, names: Collection[str]) -> list[Engine]:
    """Makes the engines of these rows, in the table's order; nothing is imported before."""
    return [load_class(spec, Engine)(parts) for spec in ENGINES.values() if spec.path and spec.name in names]
