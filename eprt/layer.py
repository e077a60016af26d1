"""`ExpertParallelMoE`: route -> dispatch -> experts -> combine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from eprt import compiled
from eprt.config import MoEConfig, RuntimeConfig
from eprt.dense import LatentProjection, SharedExpertMLP
from eprt.dispatch import Dispatched, make_dispatcher
from eprt.dispatch.call import check_group_rows, check_hidden, check_routing
from eprt.dispatch.payload_scale import calibrated_scale
from eprt.engines import Engine, make_engines
from eprt.errors import ConfigError, EprtError, InputError, UsageError
from eprt.experts import make_executor
from eprt.graphs import LayerGraphs
from eprt.load import ExpertLoad
from eprt.placement import ExpertPlacement, SlotTable
from eprt.plan import Plan, make_plan
from eprt.rounding import ceil_div
from eprt.routing import Router, route
from eprt.routing import warmup as warmup_routing
from eprt.support import Device
from eprt.tokens import RouterLogits, TopK
from eprt.weights import ExpertWeights, LatentWeights, SharedExpertWeights
from eprt.world import World
from eprt.world.header import Header, exchange, fingerprint_of
from eprt.world.step import rounded

PHASES: tuple[str, ...] = ("route", "dispatch", "experts", "shared", "combine")


class ExpertParallelMoE(nn.Module):
    """One MoE layer whose experts are spread over a World. Every rank calls it in the same order, T = 0 included.

    For inference: no gradient flows through it, whatever requires one; the output never does.

    Args:
        config: the layer's maths.
        world: who takes part.
        experts: this rank's share, canonical (`models.load_layer` or your own); not kept.
        runtime: how to run it; "auto" names are resolved by `plan.make_plan`.
        router: used where `forward` gets no routing.
        shared: weights of the shared expert if `config.shared` is set.
        latent: projections if `config.model_hidden_size` is set.
        layer: this layer's number; ranks that call layers in different orders raise WorldMismatch.
        placement: which experts lie where, equal on all ranks; contiguous if None. `experts` are then those of
            `placement.shard(rank).experts`, in that order.

    Attributes:
        plan: what was chosen, and every candidate's reason.
        engines: what can do the work of a call, the preferred first (`eprt.engines`).
        observe: `observe(phase)` returns a context manager entered around each of `PHASES`. Replace it to time, trace
            (`torch.profiler.record_function`) or check; default nothing.
        see: `see(phase, found)` is told what "route" chose (TopK, or RouterLogits where a kernel chooses) and what
            "dispatch" returned (`Dispatched`: tokens and handle), once a round; default None.

    Raises:
        ConfigError: weights that don't fit the config; UnsupportedError: no pair can run it, with every reason. The
            same on every rank.
    """

    def __init__(
        self,
        config: MoEConfig,
        world: World,
        experts: ExpertWeights,
        *,
        runtime: RuntimeConfig | None = None,
        router: Router | None = None,
        shared: SharedExpertWeights | None = None,
        latent: LatentWeights | None = None,
        layer: int = 0,
        placement: ExpertPlacement | None = None,
    ) -> None:
        super().__init__()
        runtime = runtime or RuntimeConfig()
        self.config = config
        self.world = world
        self.observe: Callable[[str], AbstractContextManager[Any]] = _no_observer
        self.see: Callable[[str, TopK | RouterLogits | Dispatched], object] | None = None
        try:
            _require_pair("shared", config.shared, shared)
            _require_pair("latent", config.model_hidden_size, latent)
            if shared is not None:
                shared.check(config)
            if latent is not None:
                latent.check(config)
            if router is not None:
                _require_router(router, config)
            self.placement = placement or ExpertPlacement(config.num_experts, world.parallel)
            inside = self.placement.in_slots(config)
            self.plan: Plan = make_plan(config, world.parallel, runtime, Device.of(world.device), self.placement)
            runtime = replace(runtime, max_tokens_per_rank=self.plan.max_tokens_per_rank)
        except EprtError as error:
            exchange(world, Header("build", layer, 0), error)  # the peers are in make_dispatcher
            raise
        self.dispatcher = make_dispatcher(
            self.plan.dispatcher,
            world,
            inside,
            runtime,
            self.plan.token_format,
            layer,
            input_scale=calibrated_scale(experts),
            settings=self.plan.settings,
        )
        refused: EprtError | None = None
        try:
            self.executor = make_executor(
                self.plan.executor,
                inside,
                self.dispatcher.shard,
                experts,
                world.device,
                runtime,
                self.plan.token_format,
                world.require_cold,
            )
        except EprtError as error:
            refused = error
        placed = {"placement": self.placement.fingerprint()}
        exchange(world, Header("build", layer, 1, fingerprint=fingerprint_of(placed), settings=placed), refused)
        self._slots: SlotTable | None = None
        if not self.placement.is_identity:
            one_replica = runtime.phase == "decode"
            self._slots = SlotTable(self.placement, world.device, one_replica=one_replica, rank=world.rank)
        self._load = ExpertLoad(config.num_experts, world.device) if runtime.count_load else None
        self.router = None if router is None else router.to(world.device)
        self.shared: SharedExpertMLP | None = None
        if config.shared is not None and shared is not None:
            self.shared = SharedExpertMLP(config.shared, shared).to(world.device)
        self.latent = None if latent is None else LatentProjection(latent).to(world.device)
        self.graphs: LayerGraphs | None = None
        if runtime.layer_graphs:
            self.graphs = LayerGraphs(world, self, self._by_router, config.input_size, self._most_tokens)
        self._number = compiled.register(self)
        self.engines = make_engines(self)
        self._used = False  # what is compiled and allocated lazily may still be missing

    @torch.no_grad()
    def forward(
        self,
        hidden_states: torch.Tensor,
        routing: TopK | RouterLogits | None = None,
        *,
        token_ids: torch.Tensor | None = None,
        tokens_per_rank: int | None = None,
    ) -> torch.Tensor:
        """The layer's output for this rank's tokens.

        Args:
            hidden_states: [..., H_model] bf16 or float32; T rows in all, T = 0 allowed. Under attention TP the T
                tokens are the same on each of its ranks; each sends its own slice and gets the whole result back.
            routing: TopK or RouterLogits of the T tokens; None asks the layer's own router. In a world of one, logits
                (the router's, too) go to an executor that takes them (`ExecutorSpec.takes_logits`) as they are.
            token_ids: [...] vocabulary ids, for hash routing.
            tokens_per_rank: largest T of any rank, equal on all; None takes that of the step (`World.step`), or lets
                the ranks agree, each layer for itself, which a CUDA graph capture can't.
                Under attention TP a rank sends, and its capacity holds, ceil(T / attention_tp_size) of them. Over the
                capacity the call is cut into rounds, and `observe` sees dispatch, experts and combine of each.

        Returns:
            Shape and dtype of `hidden_states`.

        Raises:
            InputError, CapacityError, WorldMismatch, RankLost, UsageError: see `Dispatcher.dispatch`.
            UsageError: the first call of a layer that wasn't passed to the `World.warmup` before.
        """
        if torch.compiler.is_compiling():
            return compiled.call(self._number, hidden_states, routing, token_ids, tokens_per_rank)
        if not self._used:
            self.world.require_cold("the first call of a layer")
        if self.graphs is not None:
            if type(tokens_per_rank) is int:
                tokens_per_rank = rounded(
                    tokens_per_rank, self.world.buckets
                )  # also where this rank's call has no graph
            if routing is None and (replayed := self._replayed(hidden_states, tokens_per_rank)) is not None:
                return replayed
        return self._forward(hidden_states, routing, token_ids, tokens_per_rank)

    def _forward(
        self,
        hidden_states: torch.Tensor,
        routing: TopK | RouterLogits | None,
        token_ids: torch.Tensor | None,
        tokens_per_rank: int | None,
    ) -> torch.Tensor:
        try:
            own = self._own_slice(hidden_states, routing, token_ids)
            group_tokens = hidden_states.numel() // self.config.input_size
            sent_per_rank = self._per_slice(tokens_per_rank, group_tokens)
            with self.observe("route"):
                chosen = self._route(*own, sent_per_rank)
                if self.see is not None:
                    self.see("route", chosen)
                chosen = self._without_padding(chosen, group_tokens)
                chosen = self._placed(chosen)
        except EprtError as error:
            self.dispatcher.refuse(error, tokens_per_rank)
        y = self._run(own[0], chosen, sent_per_rank, group_tokens)
        self._used = True
        return y if hidden_states.dim() == 2 else y.view(hidden_states.shape)

    def warmup(self) -> None:
        """Collective; called by `World.warmup(layer)`."""
        self.dispatcher.warmup()
        slots = self.dispatcher.spec.padded_top_k(self.config.top_k)
        self.executor.warmup(self.dispatcher.max_rows(), slots)
        tokens = self.dispatcher.capacity.max_tokens_per_rank
        warmup_routing(self.config, self.router, tokens, self.world.device, logits=self.executor.takes_logits)
        row = torch.zeros(1, self.config.input_size, dtype=torch.bfloat16, device=self.world.device)
        self._whole(row, self.world.parallel.attention_tp_size)
        if self._load is not None:
            nobody = self.config.num_experts
            self._load.add(torch.full((1, self.config.top_k), nobody, dtype=torch.int32, device=self.world.device))
        self._used = True
        if self.graphs is not None:
            self.graphs.capture()

    def load(self) -> torch.Tensor:
        """How often this rank's tokens chose each expert since the last `reset_load`: [E] int64 on the world's device,
        a copy. Padding (ids of "no expert") isn't counted. `eprt.balance.gather_load` sums over the ranks.

        Raises:
            UsageError: the layer doesn't count.
        """
        return self._counter().read()

    def reset_load(self) -> None:
        """Count from zero again. Raises UsageError where the layer doesn't count."""
        self._counter().reset()

    def _counter(self) -> ExpertLoad:
        if self._load is None:
            raise UsageError("this layer doesn't count its experts' load: build it with RuntimeConfig(count_load=True)")
        return self._load

    @property
    def translates_ids(self) -> bool:
        """Whether ids of experts become ids of slots: always, unless the layer was built with its experts in order."""
        return self._slots is not None

    def adopt_placement(self, placement: ExpertPlacement) -> None:
        """Send tokens where `placement` says from now on. For `eprt.balance.rebalance`, which puts the weights there:
        alone it makes wrong sums."""
        self.placement = placement
        if self._slots is not None:
            self._slots.update(placement)

    def close(self) -> None:
        """Give back the dispatcher's shared memory. Idempotent."""
        self.dispatcher.close()

    # ---- graphs of its own ------------------------------------------------------------------------------------

    @property
    def _most_tokens(self) -> int:
        """The largest R of a caller that one dispatch carries."""
        return self.dispatcher.capacity.max_tokens_per_rank * self.world.parallel.attention_tp_size

    def _by_router(self, hidden_states: torch.Tensor, tokens_per_rank: int) -> torch.Tensor:
        return self._forward(hidden_states, None, None, tokens_per_rank)

    def _replayed(self, hidden_states: object, tokens_per_rank: object) -> torch.Tensor | None:
        """The output of the layer's own graph; None where it has none for such a call, where phases are observed, and
        where the call will be refused."""
        graphs, router, width, step = self.graphs, self.router, self.config.input_size, self.world.current_step
        if tokens_per_rank is None and step is not None:
            tokens_per_rank = step.tokens_per_rank
        if graphs is None or router is None or router.token_table is not None or self.world.padding is not None:
            return None
        if type(tokens_per_rank) is not int or self.observe is not _no_observer or self.see is not None:
            return None
        if not isinstance(hidden_states, torch.Tensor) or hidden_states.layout != torch.strided:
            return None
        if hidden_states.dim() < 2 or hidden_states.shape[-1] != width:
            return None
        x = hidden_states.reshape(-1, width)
        most = tokens_per_rank if step is None else step.tokens[self.world.rank]
        y = graphs.replay(x, tokens_per_rank) if x.shape[0] <= min(most, tokens_per_rank) else None
        return None if y is None else y.view(hidden_states.shape)

    # ---- the steps ------------------------------------------------------------------------------------------

    def _own_slice(
        self, hidden_states: torch.Tensor, routing: TopK | RouterLogits | None, token_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, TopK | RouterLogits | None, torch.Tensor | None]:
        """Rows this rank sends: all of its own, or its part of what its attention-TP group holds together."""
        width = self.config.input_size
        self._check_hidden(hidden_states)
        x = hidden_states.reshape(-1, width)
        check_routing(x.shape[0], routing, token_ids, self.config)
        ids = None if token_ids is None else token_ids.reshape(-1)
        size = self.world.parallel.attention_tp_size
        if size == 1:
            return x, routing, ids
        part = ceil_div(x.shape[0], size)
        start = self.world.attention_tp_rank * part
        rows = slice(start, start + part)
        return x[rows], None if routing is None else routing.narrow(start, part), None if ids is None else ids[rows]

    def _check_hidden(self, x: object) -> None:
        """What the dispatcher can't see: it gets this rank's slice, behind the latent projection."""
        width = self.config.input_size
        if not isinstance(x, torch.Tensor):
            raise InputError(f"hidden_states is a {type(x).__name__}: expected a tensor [..., {width}]")
        parts = (("the shared expert", self.shared), ("the latent projection", self.latent))
        only = [(part.dtype, name) for name, part in parts if part is not None]
        check_hidden(x, width, self.world.device, meaning="the model's hidden", flat=False, only=only)

    def _route(
        self,
        x: torch.Tensor,
        routing: TopK | RouterLogits | None,
        token_ids: torch.Tensor | None,
        tokens_per_rank: int | None,
    ) -> TopK | RouterLogits:
        """The choice of experts; logits where the executor makes it."""
        router = self.router
        if routing is None:
            if router is None:
                raise InputError("the layer has no router of its own: pass routing=TopK(...) or RouterLogits(...)")
            if self.world.size > 1 or not self.executor.takes_logits or self._needs_ids:
                return router(x, token_ids)
            routing = router.logits(x)
        if isinstance(routing, TopK) or self._engine(x, routing, tokens_per_rank) is not None:
            return routing
        bias, table = (None, None) if router is None else (router.correction_bias, router.token_table)
        return route(
            routing,
            self.config.routing,
            self.config.top_k,
            correction_bias=bias,
            token_ids=token_ids,
            token_table=table,
        )

    @property
    def _needs_ids(self) -> bool:
        """Whether this layer looks at the chosen experts itself, so that no kernel may choose them unseen."""
        return self._slots is not None or self._load is not None

    def _placed(self, chosen: TopK | RouterLogits) -> TopK | RouterLogits:
        """Ids of experts are counted and become ids of slots, here and nowhere else."""
        if not self._needs_ids or not isinstance(chosen, TopK):
            return chosen
        chosen.check(self.config.num_experts, self.config.top_k)
        if chosen.ids.device.type != self.world.device.type:
            raise InputError(
                f"topk_ids is on {chosen.ids.device}: the world runs on {self.world.device}; move it there"
            )
        if self.world.device.type == "cpu" or self.dispatcher.full_validation:
            chosen.check_ids(self.config.num_experts)
        if self._load is not None:
            self._load.add(chosen.ids)
        return chosen if self._slots is None else TopK(self._slots.slots_of(chosen.ids), chosen.weights)

    def _without_padding(self, chosen: TopK | RouterLogits, num_tokens: int) -> TopK | RouterLogits:
        """Rows that only fill a batch up name no expert (`World.padding`); `num_tokens` before they are cut in slices.
        Where the executor chooses, which is in a world of one, they are computed for nothing."""
        padding = self.world.padding
        if padding is None or num_tokens == 0 or isinstance(chosen, RouterLogits):
            return chosen
        if padding.shape[0] != num_tokens:
            raise InputError(
                f"a layer inside a batch of {padding.shape[0]} padded rows got {num_tokens}: which of them hold tokens?"
                " Call it with all rows, or with none"
            )
        size, part = self.world.parallel.attention_tp_size, chosen.ids.shape[0]
        if size > 1:
            first = self.world.attention_tp_rank * ceil_div(num_tokens, size)
            padding = padding[first : first + part]
        return TopK(torch.where(padding, self.config.num_experts, chosen.ids), chosen.weights)

    def _engine(self, x: torch.Tensor, choice: TopK | RouterLogits, tokens_per_rank: int | None) -> Engine | None:
        """What does this call; None for logits that no engine takes as they are."""
        if self._needs_ids and not isinstance(choice, TopK):
            return None  # a kernel would choose experts unseen
        return next((engine for engine in self.engines if engine.takes(x, choice, tokens_per_rank)), None)

    def _run(
        self, x: torch.Tensor, choice: TopK | RouterLogits, tokens_per_rank: int | None, group_tokens: int
    ) -> torch.Tensor:
        """Dispatch, experts, combine; over the capacity in rounds that every rank makes, idle ones too."""
        engine = self._engine(x, choice, tokens_per_rank)
        if engine is None:
            raise UsageError("no engine takes this call: the last row of eprt.engines.ENGINES must take every TopK")
        most, cut = self.dispatcher.capacity.max_tokens_per_rank, not self.dispatcher.runtime.strict_capacity
        rows, start, outputs = most, 0, list[torch.Tensor]()
        inside, dense = x, None
        while True:
            with self.observe("dispatch"):
                if start == 0:
                    inside, choice = self._inside(x, choice)
                    rows = engine.agree(inside, choice, tokens_per_rank, group_tokens, cut)
                now = _round(inside, choice, start, rows, most)
                if start > 0:
                    engine.agree(*now)
                work = engine.begin(*now)
            try:
                if self.see is not None and isinstance(work, Dispatched):
                    self.see("dispatch", work)
                with self.observe("experts"):
                    y = engine.compute(work)
                if start == 0:
                    with self.observe("shared"):
                        dense = None if self.shared is None else self.shared(x)
                start += most
                with self.observe("combine"):
                    outputs.append(engine.finish(y, work))
                    if start >= rows:
                        return self._outside(outputs, dense, group_tokens)
            finally:
                engine.close(work)

    def _inside(self, x: torch.Tensor, choice: TopK | RouterLogits) -> tuple[torch.Tensor, TopK | RouterLogits]:
        """Tokens as the experts see them, and the weights that they are to apply."""
        inside = x if self.latent is None else self.latent.into(x)
        # Weights that lie elsewhere are dispatch's to refuse, on every rank.
        if self.config.weight_on_input and isinstance(choice, TopK) and choice.weights.device == inside.device:
            return inside * choice.weights.to(inside.dtype), TopK(choice.ids, torch.ones_like(choice.weights))
        return inside, choice

    def _outside(self, outputs: list[torch.Tensor], dense: torch.Tensor | None, group_tokens: int) -> torch.Tensor:
        """The rounds' sums as the model sees them: [T, H_model] of the whole attention-TP group."""
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        y = y if self.latent is None else self.latent.out_of(y)
        y = y if dense is None else y + dense
        return self._whole(y, group_tokens)

    def _per_slice(self, tokens_per_rank: int | None, num_tokens: int) -> int | None:
        """R of the slices that are sent."""
        size = self.world.parallel.attention_tp_size
        if size == 1 or tokens_per_rank is None:
            return tokens_per_rank
        strict = self.dispatcher.runtime.strict_capacity
        return check_group_rows(tokens_per_rank, num_tokens, size, self.dispatcher.capacity, strict)

    def _whole(self, y: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """The attention-TP group's slices back together; equal on each of its ranks."""
        size = self.world.parallel.attention_tp_size
        if size == 1:
            return y
        part = ceil_div(num_tokens, size)
        padded = y if y.shape[0] == part else F.pad(y, (0, 0, 0, part - y.shape[0]))
        return self.world.gather_attention_tp(padded)[:num_tokens]


def _round(
    inside: torch.Tensor, choice: TopK | RouterLogits, start: int, rows: int, most: int
) -> tuple[torch.Tensor, TopK | RouterLogits, int]:
    """Tokens, choice and R of the round that begins at token `start`."""
    if rows <= most:
        return inside, choice, rows
    return inside[start : start + most], choice.narrow(start, most), min(most, rows - start)


def _require_router(router: Router, config: MoEConfig) -> None:
    """Raises ConfigError unless the router chooses among this layer's experts, and as the config says."""
    found = (*router.weight.shape, router.top_k)
    expected = (config.num_experts, config.input_size, config.top_k)
    if found != expected:
        raise ConfigError(f"the router has (experts, hidden, top_k) {found}: the config says {expected}")
    if router.routing != config.routing:
        raise ConfigError(f"the router has {router.routing}: the config says {config.routing}; build both from one")


def _require_pair(name: str, wanted: object, given: object) -> None:
    if (wanted is None) != (given is None):
        raise ConfigError(f"{name} weights are {'missing' if given is None else 'given'}, the config says otherwise")


_NOTHING = nullcontext()


def _no_observer(phase: str) -> AbstractContextManager[Any]:
    return _NOTHING
