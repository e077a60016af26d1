"""`ExpertParallelMoE`: route -> dispatch -> experts -> combine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from eprt import compiled
from eprt.config import MoEConfig, RuntimeConfig
from eprt.dense import LatentProjection, SharedExpertMLP
from eprt.dispatch import Dispatched, make_dispatcher
from eprt.dispatch.call import check_hidden, check_routing, looks_of
from eprt.dispatch.payload_scale import calibrated_scale
from eprt.engines import Engine, make_engines
from eprt.errors import ConfigError, EprtError, InputError, UsageError
from eprt.experts import make_executor
from eprt.graphs import LayerGraphs
from eprt.layer.slices import Slices
from eprt.layer.slots import ChosenSlots
from eprt.placement import ExpertPlacement
from eprt.plan import Plan, make_plan
from eprt.routing import Router, route
from eprt.routing import warmup as warmup_routing
from eprt.support import Device
from eprt.tokens import RouterLogits, TopK
from eprt.weights import ExpertWeights, LatentWeights, SharedExpertWeights
from eprt.world import World
from eprt.world.agree import Header, exchange, fingerprint_of
from eprt.world.collectives import rounded

PHASES: tuple[str, ...] = ("route", "dispatch", "experts", "shared", "combine")
_unseen: dict[str, AbstractContextManager[Any]] = dict.fromkeys(PHASES, nullcontext())
_no_observer: Callable[[str], AbstractContextManager[Any]] = _unseen.__getitem__


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
                router.check(config)
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
        self._slices = Slices(world)
        self._slots = ChosenSlots(
            config,
            world,
            self._slices,
            self.placement,
            one_replica=runtime.phase == "decode",
            count_load=runtime.count_load,
        )
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
        self._accepted: tuple[object, ...] | None = None  # what was right about the last call's hidden states

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
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.forward(hidden_states, routing, token_ids=token_ids, tokens_per_rank=tokens_per_rank)
        if torch.compiler.is_compiling():
            return compiled.call(self._number, hidden_states, routing, token_ids, tokens_per_rank)
        if not self._used:
            self.world.require_cold("the first call of a layer")
        if self.graphs is not None:
            if type(tokens_per_rank) is int:  # also where this rank's call has no graph
                tokens_per_rank = rounded(tokens_per_rank, self.world.buckets)
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
        """Route; then `_run`: dispatch, experts, combine."""
        dispatcher = self.dispatcher
        try:
            rows = self._checked(hidden_states, routing, token_ids)
            group_tokens = rows.shape[0]
            ids = None if token_ids is None else token_ids.reshape(-1)
            x, sent_per_rank = rows, tokens_per_rank
            if self._slices.several:
                x, routing, ids = self._slices.own(rows, routing, ids)
                sent_per_rank = self._slices.agreed(tokens_per_rank, group_tokens, dispatcher)
            with self.observe("route"):
                chosen = self._route(x, routing, ids, sent_per_rank)
                if self.see is not None:
                    self.see("route", chosen)
                chosen = self._slots.of(chosen, group_tokens, dispatcher.full_validation)
        except EprtError as error:
            dispatcher.refuse(error, tokens_per_rank)
        y = self._run(x, chosen, sent_per_rank, group_tokens)
        self._used = True
        return y if rows is hidden_states else y.view(hidden_states.shape)

    def warmup(self) -> None:
        """Collective; called by `World.warmup(layer)`."""
        self.dispatcher.warmup()
        slots = self.dispatcher.spec.padded_top_k(self.config.top_k)
        self.executor.warmup(self.dispatcher.max_rows(), slots)
        tokens = self.dispatcher.capacity.max_tokens_per_rank
        warmup_routing(self.config, self.router, tokens, self.world.device, logits=self.executor.takes_logits)
        row = torch.zeros(1, self.config.input_size, dtype=torch.bfloat16, device=self.world.device)
        if self._slices.several:
            self._slices.whole(row, self.world.parallel.attention_tp_size)
        self._slots.warmup()
        self._used = True
        if self.graphs is not None:
            self.graphs.capture()

    def load(self) -> torch.Tensor:
        """How often this rank's tokens chose each expert since the last `reset_load`: [E] int64 on the world's device,
        a copy. Padding (ids of "no expert") isn't counted. `eprt.balance.gather_load` sums over the ranks.

        Raises:
            UsageError: the layer doesn't count.
        """
        return self._slots.load.read()

    def reset_load(self) -> None:
        """Count from zero again. Raises UsageError where the layer doesn't count."""
        self._slots.load.reset()

    @property
    def translates_ids(self) -> bool:
        """Whether ids of experts become ids of slots: always, unless the layer was built with its experts in order."""
        return self._slots.translates

    def adopt_placement(self, placement: ExpertPlacement) -> None:
        """Send tokens where `placement` says from now on. For `eprt.balance.rebalance`, which puts the weights there:
        alone it makes wrong sums."""
        self.placement = placement
        self._slots.adopt(placement)

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

    def _replayed(self, hidden_states: torch.Tensor, tokens_per_rank: int | None) -> torch.Tensor | None:
        """The output of the layer's own graph; None where it has none for such a call, or phases are observed."""
        graphs, router, unseen = self.graphs, self.router, self.observe is _no_observer and self.see is None
        if graphs is None or router is None or router.token_table is not None or not unseen:
            return None
        return graphs.output_of(hidden_states, tokens_per_rank)

    # ---- the steps ------------------------------------------------------------------------------------------

    def _checked(self, x: object, routing: object, token_ids: object) -> torch.Tensor:
        """`x` as [T, H_model], once it is found to be right. The dispatcher can't: it gets this rank's slice, behind
        the latent projection. What looks like the last call's was checked then."""
        width = self.config.input_size
        if not isinstance(x, torch.Tensor):
            raise InputError(f"hidden_states is a {type(x).__name__}: expected a tensor [..., {width}]")
        shared, latent = self.shared, self.latent
        looks = looks_of(x), shared and shared.dtype, latent and latent.dtype
        if looks[0] is None or looks != self._accepted:
            parts = (("the shared expert", shared), ("the latent projection", latent))
            only = [(part.dtype, name) for name, part in parts if part is not None]
            check_hidden(x, width, self.world.device, meaning="the model's hidden", flat=False, only=only)
            self._accepted = looks
        rows = x if x.dim() == 2 else x.reshape(-1, width)
        if routing is not None or token_ids is not None:
            check_routing(rows.shape[0], routing, token_ids, self.config)
        return rows

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
            if self.world.size > 1 or not self.executor.takes_logits or self._slots.need_ids:
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

    def _engine(self, x: torch.Tensor, choice: TopK | RouterLogits, tokens_per_rank: int | None) -> Engine | None:
        """What does this call; None for logits that no engine takes as they are."""
        if not isinstance(choice, TopK) and self._slots.need_ids:
            return None  # a kernel would choose experts unseen
        for engine in self.engines:
            if engine.takes(x, choice, tokens_per_rank):
                return engine
        return None

    def _run(
        self, x: torch.Tensor, choice: TopK | RouterLogits, tokens_per_rank: int | None, group_tokens: int
    ) -> torch.Tensor:
        """Dispatch, experts, combine; over the capacity in rounds that every rank makes, idle ones too."""
        engine, shared, dispatcher = self._engine(x, choice, tokens_per_rank), self.shared, self.dispatcher
        if engine is None:
            raise UsageError("no engine takes this call: the last row of eprt.engines.ENGINES must take every TopK")
        most, cut = dispatcher.capacity.max_tokens_per_rank, not dispatcher.runtime.strict_capacity
        rows, start, outputs = most, 0, list[torch.Tensor]()
        inside, dense = x, None
        while True:
            with self.observe("dispatch"):
                if start == 0:
                    inside, choice = self._inside(x, choice)
                    rows = engine.agree(inside, choice, tokens_per_rank, group_tokens, cut)
                now = inside, choice, rows
                if rows > most:
                    now = inside[start : start + most], choice.narrow(start, most), min(most, rows - start)
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
                        dense = None if shared is None else shared(x)
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
        return self._slices.whole(y, group_tokens) if self._slices.several else y


def _require_pair(name: str, wanted: object, given: object) -> None:
    if (wanted is None) != (given is None):
        raise ConfigError(f"{name} weights are {'missing' if given is None else 'given'}, the config says otherwise")
