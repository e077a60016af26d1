"""`ExpertParallelMoE`: route -> dispatch -> experts -> combine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from eprt import compiled
from eprt.config import MoEConfig, RuntimeConfig
from eprt.dense import LatentProjection, SharedExpertMLP
from eprt.dispatch import Dispatched, calibrated_scale, make_dispatcher
from eprt.dispatch.call import check_hidden, check_routing
from eprt.engines import Engine, make_engines
from eprt.errors import EprtError, InputError, UsageError
from eprt.experts import Executor, make_executor
from eprt.graphs import LayerGraphs
from eprt.kinds import require_kinds
from eprt.layer.loading import ExpertLoading
from eprt.layer.parts import check_dtypes, check_number, check_parts, placement_in
from eprt.layer.rounds import Given, LayerCall, Round, run_engine, run_rounds
from eprt.layer.slots import ChosenSlots, Slices
from eprt.layer.warming import compile_kernels, recorded_dtype
from eprt.placement import ExpertPlacement
from eprt.plan import Plan, make_plan
from eprt.routing import Router, route
from eprt.support import Device
from eprt.tokens import RouterLogits, TopK
from eprt.weights import ExpertWeights, LatentWeights, SharedExpertWeights
from eprt.world import World
from eprt.world.agree import Header, exchange, fingerprint_of, shared_errors
from eprt.world.collectives import rounded

PHASES: tuple[str, ...] = ("route", "dispatch", "experts", "shared", "combine")
_unseen: dict[str, AbstractContextManager[Any]] = dict.fromkeys(PHASES, nullcontext())
_no_observer: Callable[[str], AbstractContextManager[Any]] = _unseen.__getitem__


class ExpertParallelMoE(nn.Module):
    """One MoE layer whose experts are spread over a World. Every rank calls it in the same order, T = 0 included.

    For inference: no gradient flows through it, whatever requires one; the output never does. Its `state_dict` has
    the router, the shared expert and the projections; experts, in the executor's layout, aren't in it: `load_experts`.

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
        engines: engines that may make a call in place of the dispatcher and the executor, the preferred first.
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
        given = locals()
        require_kinds(ExpertParallelMoE.__init__, {"world": world})  # without one, there are no peers to tell
        super().__init__()
        self.config, self.world = config, world
        self.observe: Callable[[str], AbstractContextManager[Any]] = _no_observer
        self.see: Callable[[str, TopK | RouterLogits | Dispatched], object] | None = None
        runtime = runtime or RuntimeConfig()
        with shared_errors(world, Header("build")):  # the peers are in make_dispatcher
            check_number(layer)
            require_kinds(ExpertParallelMoE.__init__, given)
            check_parts(config, router, shared, latent)
            self.placement = placement_in(world.parallel, config, placement)
            inside = self.placement.in_slots(config)
            self.plan: Plan = make_plan(config, world.parallel, runtime, Device.of(world.device), self.placement)
            runtime = replace(runtime, max_tokens_per_rank=self.plan.max_tokens_per_rank)
            experts.check(config, self.placement.shard(world.rank))
        scale = calibrated_scale(experts)
        pair = self.plan.token_format, layer
        self.dispatcher = make_dispatcher(
            self.plan.dispatcher, world, inside, runtime, *pair, input_scale=scale, settings=self.plan.settings
        )
        self._loading = ExpertLoading(world, config, self.dispatcher, experts.hidden_order)
        self._slices = Slices(world)
        how = {"one_replica": runtime.phase == "decode", "count_load": runtime.count_load}
        self._slots = ChosenSlots(config, world, self._slices, self.placement, **how)
        self.router = None if router is None else router.to(world.device)
        dense = None if config.shared is None or shared is None else SharedExpertMLP(config.shared, shared)
        self.shared = None if dense is None else dense.to(world.device)
        self.latent = None if latent is None else LatentProjection(latent).to(world.device)
        parts = (self.shared, "the shared expert"), (self.latent, "the latent projection")
        self._typed = [(part, name) for part, name in parts if part is not None]
        self.executor = self._make_executor(inside, experts, runtime, layer)
        self.engines = make_engines(self, [name for name, verdict in self.plan.engines.items() if verdict])
        self.graphs: LayerGraphs | None = None
        if runtime.layer_graphs:
            dtype = recorded_dtype(config, router, self._accepted_dtypes())
            self.graphs = LayerGraphs(world, self, self._by_router, config.input_size, self._most_tokens, dtype)
        self._number, self._used = compiled.register(self), False  # not used: what is made lazily may be missing

    def _make_executor(self, inside: MoEConfig, experts: ExpertWeights, runtime: RuntimeConfig, layer: int) -> Executor:
        """Builds the executor, then compares the placement with the peers, so that a refusal is one on all ranks."""
        world = self.world
        placed = {"placement": self.placement.fingerprint(), "hidden_order": experts.order_fingerprint()}
        header = Header("build", layer, 1, fingerprint=fingerprint_of(placed), settings=placed)
        what = self.plan.executor, inside, self.dispatcher.shard, experts, world.device, runtime
        with shared_errors(world, header):
            check_dtypes(self._accepted_dtypes())
            executor = make_executor(*what, self.plan.token_format, world.require_cold)
        exchange(world, header)
        return executor

    def _accepted_dtypes(self) -> list[tuple[torch.dtype, str]]:
        """Returns the only dtypes that parts of the layer take, each with the name of the part; `.to()` casts parts."""
        return [*[(part.dtype, name) for part, name in self._typed], *self.dispatcher.dtypes]

    def forward(
        self,
        hidden_states: torch.Tensor,
        routing: TopK | RouterLogits | None = None,
        *,
        token_ids: torch.Tensor | None = None,
        tokens_per_rank: int | None = None,
    ) -> torch.Tensor:
        """Returns the layer's output for this rank's tokens.

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
        given = Given(hidden_states, routing, token_ids, tokens_per_rank)
        if (output := self._by_other_means(given)) is not None:
            return output
        call = self._route(given)
        if call.engine is not None:
            return run_engine(self, call.engine, call)
        dispatcher = self.dispatcher
        with self.observe("dispatch"):
            whole = self._agree(call)
            capacity = dispatcher.capacity.max_tokens_per_rank
            sent = dispatcher.send(*(whole if whole.rows <= capacity else whole.part(0, capacity)))
        try:
            if self.see is not None:
                self.see("dispatch", sent)
            with self.observe("experts"):
                y = self.executor(sent.tokens, out=dispatcher.output_buffer(sent.handle))
            with self.observe("shared"):
                call.dense = None if self.shared is None else self.shared(call.tokens)
            with self.observe("combine"):
                y = dispatcher.combine(y, sent.handle)
                if whole.rows <= capacity:
                    return self._finish(y, call)
        finally:
            sent.handle.close()
        return run_rounds(self, whole, y, call)

    def warmup(self) -> None:
        """Compiles and allocates all that a call needs. Collective; called by `World.warmup(layer)`."""
        self.dispatcher.warmup()
        compile_kernels(self.config, self.dispatcher, self.executor, self.router, wait=True)
        row = torch.zeros(1, self.config.input_size, dtype=torch.bfloat16, device=self.world.device)
        if self._slices.several:
            self._slices.whole(row, self.world.parallel.attention_tp_size)
        self._slots.warmup()
        self._used = True
        if self.graphs is not None and self.router is not None and self.router.token_table is None:
            self.graphs.capture()  # calls that bring nothing but tokens

    def start_compiling(self, earlier: Sequence[ExpertParallelMoE] = ()) -> None:
        """Starts to compile in other processes what `warmup`, which waits for them, needs; not where one of `earlier`
        needs the same. For a layer after which there is still much to load. Not collective."""
        if all(other.config != self.config for other in earlier):
            compile_kernels(self.config, self.dispatcher, self.executor, self.router, wait=False)

    def load_experts(
        self, weights: ExpertWeights | None, experts: Sequence[int] | None = None, *, agree: bool = True
    ) -> None:
        """Replaces experts between two steps: prepared as the first were, written into the same tensors, so captured
        graphs stay valid. Collective. Costs an eighth of a layer's memory; all of it where `slot_tensors` refuses.

        Args:
            weights: canonical, not kept: all of this rank's, in the order of `placement.shard(rank).experts`, or one
                for each of `experts`. None: this rank brings none of `experts`.
            experts: numbers of experts; those that this rank doesn't hold are left out. Ranks may name different ones,
                but all that hold one (its replicas, its MoE-TP slices) name it. None: all of this rank's.
            agree: False: this rank alone; its caller sees to it that all ranks do the same.

        Raises:
            ConfigError, UsageError, UnsupportedError: what doesn't fit; the layer is as it was. The same on every rank,
                if they agree.
            EprtError: what failed later. Calls then raise UsageError on all ranks until all experts were loaded.
        """
        self._loading.run(self.executor, weights, experts, self.placement, agree)

    def load(self) -> torch.Tensor:
        """Counts how often this rank's tokens chose each expert since the last `reset_load`: [E] int64 on the world's
        device, a copy. Padding (ids of "no expert") isn't counted. `eprt.balance.gather_load` sums over the ranks.

        Raises:
            UsageError: the layer doesn't count.
        """
        return self._slots.load.read()

    def reset_load(self) -> None:
        """Counts from zero again. Raises UsageError where the layer doesn't count."""
        self._slots.load.reset()

    def refuse_calls(self, why: str) -> None:
        """Lets calls on this rank raise UsageError, with this text, until all experts were loaded."""
        self._loading.broken = why

    @property
    def broken(self) -> str:
        """Says why calls are refused until all experts were loaded, or "" where they aren't."""
        return self._loading.broken

    @property
    def translates_ids(self) -> bool:
        """Tells whether ids of experts become ids of slots: always, unless the experts were built in order."""
        return self._slots.translates

    def adopt_placement(self, placement: ExpertPlacement) -> None:
        """Sends tokens where `placement` says. For `eprt.balance.rebalance`, which puts the weights there."""
        self.placement = placement
        self._slots.adopt(placement)

    def close(self) -> None:
        """Gives back the dispatcher's shared memory. Idempotent."""
        self.dispatcher.close()

    @property
    def _most_tokens(self) -> int:
        """Returns the largest R of a caller that one dispatch carries."""
        return self.dispatcher.capacity.max_tokens_per_rank * self.world.parallel.attention_tp_size

    def _by_router(self, hidden_states: torch.Tensor, tokens_per_rank: int) -> torch.Tensor:
        """Makes the call that the layer's graphs record. They pad its rows, so it isn't replayed itself."""
        return self.forward(hidden_states, tokens_per_rank=tokens_per_rank)

    def _by_other_means(self, given: Given) -> torch.Tensor | None:
        """Returns the output of a call with gradients and autocast off, of torch.compile's operator or of a graph's
        replay; None where the call is to be made eagerly."""
        hidden_states, routing, token_ids, tokens_per_rank = given
        if torch.is_autocast_enabled(kind := self.world.device.type) or torch.is_grad_enabled():
            with torch.no_grad(), torch.autocast(kind, enabled=False):
                return self.forward(hidden_states, routing, token_ids=token_ids, tokens_per_rank=tokens_per_rank)
        if torch.compiler.is_compiling():
            return compiled.call(self._number, *given)
        if self.broken:
            self.dispatcher.refuse(UsageError(self.broken), tokens_per_rank)
        if not self._used:
            self.world.require_cold("the first call of a layer")
        graphs, unseen = self.graphs, self.observe is _no_observer and self.see is None
        if graphs is None or routing is not None or not unseen:
            return None
        return graphs.output_of(hidden_states, self._rounded(tokens_per_rank))

    def _rounded(self, tokens_per_rank: int | None) -> int | None:
        """Returns R up to the next bucket, also where this rank's call has no graph: its peers' calls may. Not over a
        strict capacity that holds it: buckets are the World's, and other layers may have larger ones."""
        if type(tokens_per_rank) is not int:
            return tokens_per_rank
        rows, most = rounded(tokens_per_rank, self.world.buckets), self._most_tokens
        return rows if rows <= most or not self.dispatcher.runtime.strict_capacity else max(tokens_per_rank, most)

    def _route(self, given: Given) -> LayerCall:
        """Checks a call, takes this rank's slice of its tokens, and chooses their experts.

        Raises:
            InputError, CapacityError, UsageError: on every rank.
        """
        hidden_states, routing, token_ids, tokens_per_rank = given
        if self.graphs is not None:
            tokens_per_rank = self._rounded(tokens_per_rank)
        try:
            rows = self._checked(hidden_states, routing, token_ids)
            x, sent_per_rank, ids = rows, tokens_per_rank, None if token_ids is None else token_ids.reshape(-1)
            if self._slices.several:
                x, routing, ids = self._slices.own(rows, routing, ids)
                sent_per_rank = self._slices.agreed(tokens_per_rank, rows.shape[0], self.dispatcher)
            with self.observe("route"):
                choice = self._choose(x, routing, ids, sent_per_rank)
                if self.see is not None:
                    self.see("route", choice)
                if isinstance(choice, TopK) and (self._slots.need_ids or self.world.padding is not None):
                    choice = self._slots.of(choice, rows.shape[0], self.dispatcher.full_validation)
        except EprtError as error:
            self.dispatcher.refuse(error, tokens_per_rank)
        engine = self._engine(x, choice, sent_per_rank) if self.engines else None
        return LayerCall(x, choice, sent_per_rank, rows.shape[0], hidden_states.shape, engine)

    def _checked(self, x: object, routing: object, token_ids: object) -> torch.Tensor:
        """Returns `x` as [T, H_model]. The dispatcher doesn't check it again, as it gets this rank's slice, behind the
        latent projection."""
        width = self.config.input_size
        if not isinstance(x, torch.Tensor):
            raise InputError(f"hidden_states is a {type(x).__name__}: expected a tensor [..., {width}]")
        only = self._accepted_dtypes() if self._typed else self.dispatcher.dtypes
        check_hidden(x, width, self.world.device, meaning="the model's hidden", flat=False, only=only)
        rows = x if x.dim() == 2 else x.reshape(-1, width)
        if routing is not None or token_ids is not None:
            check_routing(rows.shape[0], routing, token_ids, self.config)
        return rows

    def _choose(
        self,
        x: torch.Tensor,
        routing: TopK | RouterLogits | None,
        token_ids: torch.Tensor | None,
        tokens_per_rank: int | None,
    ) -> TopK | RouterLogits:
        """Returns the choice of experts, or logits for an engine that makes it."""
        router = self.router
        if routing is None:
            if router is None:
                raise InputError("the layer has no router of its own: pass routing=TopK(...) or RouterLogits(...)")
            if not self.engines:
                return router(x, token_ids)
            routing = router.logits(x)
        if isinstance(routing, TopK) or self._engine(x, routing, tokens_per_rank) is not None:
            return routing
        bias, table = (None, None) if router is None else (router.correction_bias, router.token_table)
        given = {"correction_bias": bias, "token_ids": token_ids, "token_table": table}
        return route(routing, self.config.routing, self.config.top_k, **given)

    def _engine(self, x: torch.Tensor, choice: TopK | RouterLogits, tokens_per_rank: int | None) -> Engine | None:
        """Returns the first engine that takes the call; None: the dispatcher and the executor make it."""
        return next((engine for engine in self.engines if engine.takes(x, choice, tokens_per_rank)), None)

    def _agree(self, call: LayerCall) -> Round:
        """Returns the tokens as the experts see them, the weights that they are to apply, and R, agreed by all ranks;
        R may be over the capacity unless `strict_capacity` is set."""
        x, choice = call.tokens, call.choice
        inside = x if self.latent is None else self.latent.into(x)
        inside = inside if self._loading.order is None else inside.index_select(1, self._loading.order)
        # Weights that lie elsewhere are dispatch's to refuse, on every rank.
        if self.config.weight_on_input and isinstance(choice, TopK) and choice.weights.device == inside.device:
            inside, choice = inside * choice.weights.to(inside.dtype), TopK(choice.ids, torch.ones_like(choice.weights))
        cut = not self.dispatcher.runtime.strict_capacity
        if call.engine is not None:
            rows = call.engine.agree(inside, choice, call.tokens_per_rank, call.group_tokens, cut)
        elif isinstance(choice, TopK):
            given = inside, choice, call.tokens_per_rank
            rows = self.dispatcher.agree(*given, group_tokens=call.group_tokens, cut=cut, checked=True)
        else:
            raise UsageError("no engine takes these router logits, and a dispatcher needs a TopK")
        return Round(inside, choice, rows)

    def _finish(self, y: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """Returns the experts' sums as the model sees them, of the whole attention-TP group."""
        y = y if self.latent is None else self.latent.out_of(y)
        y = y if call.dense is None else y + call.dense
        y = self._slices.whole(y, call.group_tokens) if self._slices.several else y
        self._used = True
        return y if len(call.shape) == 2 else y.view(call.shape)
