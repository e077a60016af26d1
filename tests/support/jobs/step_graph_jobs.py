"""A plain PyTorch decode loop over MoE layers, replayed in step graphs or layer graphs and beside it eagerly with the
oracle's experts: jobs for gloo ranks in CI and for GPUs. No pytest here: the ranks import this module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import torch

from eprt.config import MoEConfig, RuntimeConfig
from eprt.conformance.cases import CONFIGS, Batch
from eprt.conformance.oracle import expected_outputs, full_weights, layer_of, relative_error
from eprt.graphs import StepGraphs
from eprt.placement import ExpertPlacement
from eprt.ranks.launcher import RankContext
from eprt.routing import Router
from eprt.tokens import TopK
from eprt.weights import ExpertWeights
from eprt.world.collectives import Step
from support.builders import BEHIND_S, caught, die, said
from support.cases.decoder import EMPTY_ROW, Decoder, Experts, Requests

LAYERS = 2
BUCKETS = (2, 8, 16)
# Each rank's requests, step after step: bucket changes, idle ranks, an idle world, slots that are taken up again, and
# more than the largest bucket.
SCHEDULE = [
    [3, 0, 7, 1],
    [8, 8, 8, 8],
    [1, 2, 0, 1],
    [0] * 4,
    [16, 1, 0, 5],
    [20, 3, 0, 1],
    [2, 0, 1, 0],
    [7, 9, 3, 16],
]
# float32: both sides sum in float32, in another order, layer upon layer. bf16: tokens, experts' inner values and
# outputs are each rounded once a layer, 2^-9 of a number, and the cache carries that into later steps (4e-2 was seen).
# A row that is another's, or gate and up swapped, is off by about 1.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-2}


def config_of(dtype: torch.dtype) -> MoEConfig:
    """gpt-oss's layer: biases and a clamped activation, which betray a wrong order of gate and up."""
    form = "f32" if dtype == torch.float32 else "bf16"
    return replace(CONFIGS["gpt_oss"], hidden_size=256, intermediate_size=96, weight_format=form)


class Case:
    """Layers of one runtime, warm; the eager decoder with the oracle's experts, and one with the layers."""

    def __init__(
        self,
        context: RankContext,
        runtime: RuntimeConfig,
        dtype: torch.dtype,
        attention_tp: int = 1,
        router: bool = False,
    ) -> None:
        self.world = world = context.world(attention_tp_size=attention_tp, timeout_s=BEHIND_S)
        world.warm = False  # layers of other tests may have warmed it
        self.config = config = config_of(dtype)
        weights = [full_weights(config, seed) for seed in range(LAYERS)]
        self.layers = [
            layer_of(world, config, full, runtime, router=_router(config, dtype, seed) if router else None)
            for seed, full in enumerate(weights)
        ]
        world.warmup(*self.layers)
        self.dtype = dtype
        self.requests = Requests(world.dp_rank)
        self.expected = Decoder([_oracle(config, full) for full in weights], config, torch.device("cpu"), dtype)
        self.decoder = Decoder(self.layers, config, world.device, dtype)

    def idle(self) -> None:
        """What a rank without tokens does in place of a forward."""
        H, K, device = self.config.hidden_size, self.config.top_k, self.world.device
        for layer in self.layers:
            nothing = TopK(torch.empty(0, K, dtype=torch.int32, device=device), torch.empty(0, K, device=device))
            layer(torch.empty(0, H, dtype=self.dtype, device=device), nothing)

    def graphs(self, idle: bool = True, buckets: Sequence[int] = BUCKETS) -> StepGraphs:
        given = sorted(EMPTY_ROW.items(), reverse=self.world.rank % 2 == 1)  # ranks needn't name them in one order
        rows = {name: torch.tensor([value], device=self.world.device) for name, value in given}
        found = StepGraphs(
            self.world, self.layers, self.decoder, rows, buckets=buckets, idle=self.idle if idle else None
        )
        found.capture()
        self.decoder.calls.clear()
        return found

    def counts(self) -> list[int]:
        """This rank's requests of each step; the same on the ranks of an attention-TP group."""
        return [counts[self.world.dp_rank % len(counts)] for counts in SCHEDULE]

    def errors(self, output: dict[str, Any], fed: dict[str, torch.Tensor]) -> list[float]:
        """Of each layer's output."""
        with torch.no_grad():
            expected = self.expected(**{name: tensor.cpu() for name, tensor in fed.items()})
        pairs = [(output["last"], expected["last"]), *zip(output["each"], expected["each"], strict=True)]
        return [relative_error(found.cpu(), wanted) for found, wanted in pairs]

    def close(self) -> None:
        self.world.barrier()
        self.world.warm = False  # this World serves other tests, which build layers of their own
        self.world.buckets = ()
        for layer in self.layers:
            layer.close()


def _router(config: MoEConfig, dtype: torch.dtype, seed: int) -> Router:
    weight = torch.randn(config.num_experts, config.hidden_size, generator=torch.Generator().manual_seed(seed))
    return Router(weight.to(dtype), config.routing, config.top_k)


def _oracle(config: MoEConfig, full: ExpertWeights) -> Experts:
    return lambda x, topk: expected_outputs(config, full, [Batch(x, topk)])[0].to(x.dtype)


def _kept(output: Any) -> Any:
    """A copy: the next replay overwrites the views."""
    return torch.utils._pytree.tree_map(lambda tensor: tensor.clone(), output)


def decode(
    context: RankContext,
    runtime: RuntimeConfig,
    dtype: torch.dtype,
    attention_tp: int = 1,
    idle: bool = True,
    eager_rank: int = -1,
    captured_again: int = -1,
) -> tuple[list[list[float]], list[int], int]:
    """(errors of each step, rows of each forward that the host made, slots that this rank sent to experts).

    Args:
        idle: whether idle ranks have a step of their own; else they replay the forward on empty rows.
        eager_rank: one that never replays: it calls its layers in the same steps.
        captured_again: before which step all is captured anew, which must leave the caches alone.
    """
    case = Case(context, runtime, dtype, attention_tp)
    graphs, world = case.graphs(idle), case.world
    errors: list[list[float]] = []
    sent = _count_by_expert(case)
    for number, count in enumerate(case.counts()):
        if number == captured_again:
            graphs.capture()
        fed = case.requests.step(count, world.device)
        with world.step(count, number=100 + number):
            if world.rank != eager_rank:
                output = graphs(count, **fed)
            elif count:
                with torch.no_grad():
                    output = case.decoder(**fed)
            else:
                case.idle()
        graphs.wait()
        errors.append(case.errors(_kept(output), fed) if count else [])
    found = (errors, case.decoder.calls, sum(sent))
    case.close()
    return found


def _noting(target: Any, name: str, note: Callable[..., object]) -> None:
    """Has `note` see what a method returned, and then its arguments, after every call."""
    original = getattr(target, name)

    def call(*args: Any, **options: Any) -> Any:
        output = original(*args, **options)
        note(output, *args)
        return output

    setattr(target, name, call)


def _count_by_expert(case: Case) -> list[int]:
    """Filled with the number of valid slots of everything that the host sends."""
    sent: list[int] = []

    def note(_: object, hidden: torch.Tensor, topk: TopK, *__: object) -> None:
        sent.append(0 if hidden.is_cuda else int((topk.ids < case.config.num_experts).sum()))

    for layer in case.layers:
        _noting(layer.dispatcher, "send", note)
    return sent


def decode_by_layers(
    context: RankContext, runtime: RuntimeConfig, dtype: torch.dtype, in_steps: bool, own_rank: int = -1
) -> tuple[list[float], list[float], int]:
    """A loop that is eager itself, over layers with graphs of their own: (errors against layers without graphs on the
    same tokens, errors of layers that get their routing, replays).

    Args:
        in_steps: R comes from a step; else it is passed.
        own_rank: one whose second layer is given its routing, so that it replays nothing there.
    """
    case = Case(context, runtime, dtype, router=True)
    world, plain = case.world, Case(context, replace(runtime, layer_graphs=False), dtype, router=True)
    errors, own_errors, replays = [], [], list[bool]()
    for layer in case.layers:  # whether a layer's graph took a call, or left it to the layer
        _noting(layer.graphs, "replay", lambda output, *_: replays.append(output is not None))
    generator = torch.Generator().manual_seed(world.rank)
    for counts in SCHEDULE:
        count, most = counts[world.rank], max(*counts[: world.size], 1)
        x = torch.randn(count, case.config.hidden_size, generator=generator).to(world.device, dtype)
        y, expected = x, x
        for number, (layer, witness) in enumerate(zip(case.layers, plain.layers, strict=True)):
            wanted = witness(expected, tokens_per_rank=most)
            own = number == 1 and world.rank == own_rank
            topk = layer.router(y) if own else None
            before = layer.dispatcher._calls
            if in_steps:
                with world.step(count):
                    y = layer(y, topk)
            else:
                y = layer(y, topk, tokens_per_rank=most)
            assert layer.dispatcher._calls == before + 1
            (own_errors if own else errors).append(relative_error(y.cpu(), wanted.cpu()))
            y = expected = wanted
    case.close()
    plain.close()
    return errors, own_errors, sum(replays)


def refusals(context: RankContext) -> dict[str, str]:
    """What goes wrong with step graphs, and that the next call works."""
    case = Case(context, RuntimeConfig(dispatcher="none", max_tokens_per_rank=32), torch.float32)
    world, device = case.world, case.world.device
    row = {name: torch.tensor([value], device=device) for name, value in EMPTY_ROW.items()}
    found: dict[str, str] = {}

    def check(what: str, call: Callable[[], object]) -> None:
        found[what] = said(call)

    def made(forward: Callable[..., Any] = case.decoder, rows: Any = row, **options: Any) -> StepGraphs:
        return StepGraphs(world, case.layers, forward, rows, **{"buckets": (2, 4), "idle": case.idle, **options})

    graphs = case.graphs()
    fed = case.requests.step(3, device)
    check("no buckets", lambda: made(buckets=()))
    check("no inputs", lambda: made(rows={}))
    check("two rows", lambda: made(rows={"token": torch.zeros(2)}))
    check("a row that is a list", lambda: made(rows={"token": [0]}))
    check("one bucket alone", lambda: made(buckets=4))
    check("a layer that is none", lambda: StepGraphs(world, [torch.nn.ReLU()], case.decoder, row))
    check("buckets differ", lambda: made(buckets=(2, 4 + context.rank)).capture())
    check("before capture", lambda: made()(0))
    check("output of other rows", lambda: made(lambda **_: torch.zeros(1, 3)).capture())
    halfway = made(lambda token, position: token if len(token) > 2 else token[0])
    check("output of no row in the second bucket", halfway.capture)
    check("after half a capture", lambda: halfway(3, **fed))
    check("output of no tensor", lambda: made(lambda **_: {"x": 3}).capture())
    wrong = {**fed, "token": fed["token"].int()} if context.rank == 1 else fed
    check("another dtype on rank 1", lambda: graphs(3, **wrong))
    check("a list on rank 1", lambda: graphs(3, **(fed if context.rank != 1 else {**fed, "token": [1, 2, 3]})))
    check("a row too few on rank 1", lambda: graphs(3 + (context.rank == 1), **fed))
    check("a missing input", lambda: graphs(3, token=fed["token"]))

    def inside() -> None:
        with world.step(2):
            graphs(3, **fed)

    check("more than the step was told", inside)

    def capture_inside() -> None:
        with world.step(2):
            graphs.capture()

    check("capture in a step", capture_inside)

    def half_batch(token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            half = -(-token.shape[0] // 2) if token.shape[0] > 2 else token.shape[0]
            case.decoder(token[:half], position[:half])
        return token

    check("a layer with some of the rows", made(half_batch).capture)
    output = graphs(3, **fed)
    found["the next call"] = str(max(case.errors(output, fed)) <= TOLERANCE[torch.float32])
    case.close()
    check("after close", lambda: graphs(0))
    return found


def alive_changes(context: RankContext, runtime: RuntimeConfig) -> list[str]:
    """A replay of all ranks, then of all but the last; in between a new capture, where the kernels of the first can't
    follow the mask. What was wrong. Ranks that were left out can't agree on a step, so the host gives R."""
    case = Case(context, runtime, torch.bfloat16)
    graphs, world, rows = case.graphs(), case.world, BUCKETS[1]
    problems: list[str] = []
    alive = tuple(rank != world.size - 1 for rank in range(world.size))

    def step(counts: Sequence[int]) -> None:
        count = counts[world.rank]
        fed = case.requests.step(count, world.device)
        world.current_step = Step(1, (rows,) * world.size, ((),) * world.size)
        try:
            output = graphs(count, **fed)
        finally:
            world.current_step = None
        graphs.wait()
        errors = case.errors(_kept(output), fed) if count else []
        problems.extend(f"{counts}: {error}" for error in errors if not error <= TOLERANCE[torch.bfloat16])

    step([3, 5, 0, 1])
    world.barrier()
    # Slots of the lost rank's experts count for nothing.
    shard = ExpertPlacement(case.config.num_experts, world.parallel).shard(world.size - 1)
    lost = (case.expected.ids >= shard.first_expert) & (case.expected.ids < shard.end_expert)
    case.expected.weights = torch.where(lost, 0.0, case.expected.weights)
    if not alive[world.rank]:
        torch.cuda.synchronize()
        return problems
    world.shrink([world.size - 1])
    text = said(lambda: step([2, 4, 0, 0]))  # the old mask
    problems += [text] * ("StepGraphs.capture()" not in text)
    graphs.capture()
    step([5, 0, 3, 0])
    step([0, 7, 3, 0])
    torch.cuda.synchronize()
    case.close()
    return problems


def captured_after_unequal_calls(context: RankContext) -> bool:
    """Whether steps go on after a capture that follows a step in which rank 1's host called the layers and rank 0's, as
    in a replay, did not."""
    case = Case(context, RuntimeConfig(dispatcher="none", max_tokens_per_rank=32), torch.float32)
    world = case.world
    with world.step(1):
        if world.rank == 1:
            for layer in case.layers:
                world.log_call(layer.dispatcher.layer, layer.dispatcher.fingerprint)
    graphs = case.graphs()
    fed = case.requests.step(2, world.device)
    errors = case.errors(graphs(2, **fed), fed)
    case.close()
    return max(errors) <= TOLERANCE[torch.float32]


def closes_before_its_graphs(context: RankContext, runtime: RuntimeConfig) -> str:
    """What a call of them raises then. Before, a replay asks routers for changes in place."""
    case = Case(context, runtime, torch.bfloat16, router=True)
    graphs, asked = case.graphs(), Mock()
    for layer in case.layers:
        layer.router.refresh = asked
    graphs(1, **case.requests.step(1, case.world.device))
    graphs.wait()
    assert asked.call_count == LAYERS
    case.world.close()
    return caught(lambda: graphs(0))[0]


def lost_in_replay(context: RankContext, runtime: RuntimeConfig, victim: int, limit_s: float, waits: bool) -> None:
    """The victim dies between two replays, so its peers sit in one that waits for it.

    Args:
        waits: the loop waits by `StepGraphs.wait`, which hears of it; else in a synchronize of torch, from which the
            guard takes the process away.
    """
    Case(context, runtime, torch.bfloat16).close()  # compiles, on a World that has the patience for it
    inner = RankContext(context.rank, context.size, context.device)
    inner.world = lambda **sizes: context.world(timeout_s=limit_s)  # pyright: ignore[reportAttributeAccessIssue]
    case = Case(inner, runtime, torch.bfloat16)
    graphs, world = case.graphs(), case.world
    for number in range(10):
        fed = case.requests.step(2, world.device)
        with world.step(2, number=number + 1):
            if number == 5 and world.rank == victim:
                die()
            graphs(2, **fed)
            if waits or world.device.type != "cuda":
                graphs.wait()
            else:
                torch.cuda.synchronize()
