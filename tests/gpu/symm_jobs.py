"""Jobs that run inside the ranks of tests/gpu/test_symm.py. No pytest here: the ranks import this module."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from eprt.config import MoEConfig, RuntimeConfig
from eprt.conformance.checks import Check
from eprt.conformance.harness import RankContext
from eprt.dispatch import Dispatched, Dispatcher, make_dispatcher
from eprt.errors import EprtError
from eprt.tokens import TopK

E = 16
LAYERS = ("silu_bf16", "gpt_oss")


@dataclass(frozen=True)
class SizedCheck(Check):
    """A transport check at any hidden size and top-k."""

    hidden_size: int = 128
    top_k: int = 4

    @property
    def name(self) -> str:
        return f"{super().name}-H{self.hidden_size}-K{self.top_k}"

    @property
    def moe(self) -> MoEConfig:
        return moe(self.hidden_size, self.top_k)


def moe(hidden_size: int, top_k: int) -> MoEConfig:
    return MoEConfig(num_experts=E, top_k=top_k, hidden_size=hidden_size, intermediate_size=64)


def symm(context: RankContext, hidden_size: int, top_k: int, capacity: int, **runtime: object) -> Dispatcher:
    """One dispatcher for each set of arguments, kept from job to job."""
    key = ("symm", hidden_size, top_k, capacity, *sorted(runtime.items()))
    if key not in context.cache:
        world = context.world(timeout_s=30.0)  # warm, so not the World of the checks, which make dispatchers as they go
        config = RuntimeConfig(max_tokens_per_rank=capacity, **runtime)
        context.cache[key] = make_dispatcher("symm", world, moe(hidden_size, top_k), config)
        world.warmup(context.cache[key])
    return context.cache[key]


def batch(generator: torch.Generator, T: int, H: int, K: int) -> tuple[torch.Tensor, TopK]:
    device = generator.device
    x = torch.randn(T, H, device=device, generator=generator).bfloat16()
    ids = torch.rand(T, E, device=device, generator=generator).topk(K, dim=1).indices.int()
    return x, TopK(ids, torch.rand(T, K, device=device, generator=generator))


def stand_in(sent: Dispatched, dispatcher: Dispatcher, rank: int) -> torch.Tensor:
    """Executor of rank p: x * 2**p, which bf16 holds exactly, written straight into the output buffer."""
    out = dispatcher.output_buffer(sent.handle)
    return torch.mul(sent.tokens.hidden.data, 2.0**rank, out=out)


def expected(x: torch.Tensor, ids: torch.Tensor, size: int) -> torch.Tensor:
    total = torch.zeros_like(x, dtype=torch.float32)
    for rank in range(size):
        goes = (ids // (E // size) == rank) & (ids < E)
        total += torch.where(goes.any(1, keepdim=True), x.float() * 2.0**rank, 0.0)
    return total.bfloat16()


def random_steps(context: RankContext, steps: int, capacity: int, delay_share: float, H: int, K: int) -> int:
    """Random counts and R, a random rank late by up to 50 ms now and then; how many elements came back wrong. Ranks
    agree on the schedule by its seed."""
    dispatcher = symm(context, H, K, capacity)
    schedule, generator = random.Random(7), torch.Generator("cuda").manual_seed(context.rank)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(steps):
        counts = [schedule.choice((0, 1, schedule.randint(0, capacity), capacity)) for _ in range(context.size)]
        R = schedule.randint(max(*counts, 1), capacity)
        late, pause = schedule.randrange(context.size), schedule.random() * 0.05
        if schedule.random() < delay_share and late == context.rank:
            time.sleep(pause)
        x, topk = batch(generator, counts[context.rank], H, K)
        sent = dispatcher.dispatch(x, topk, R)
        out = dispatcher.combine(stand_in(sent, dispatcher, context.rank), sent.handle)
        wrong += (out != expected(x, topk.ids, context.size)).sum()
    return int(wrong)


def replay(context: RankContext, H: int, K: int, rounds: list[list[int]]) -> list[int]:
    """Capture once at R rows, replay with new data and counts; wrong elements of each replay."""
    R = 64
    dispatcher = symm(context, H, K, R)
    generator = torch.Generator("cuda").manual_seed(50 + context.rank)
    x, topk = batch(generator, R, H, K)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        sent = dispatcher.dispatch(x, topk, R)
        out = dispatcher.combine(stand_in(sent, dispatcher, context.rank), sent.handle)
    wrong: list[int] = []
    for counts in rounds:
        fresh_x, fresh = batch(generator, R, H, K)
        fresh.ids[counts[context.rank] :] = E  # an idle row: no expert
        x.copy_(fresh_x)
        topk.ids.copy_(fresh.ids)
        topk.weights.copy_(fresh.weights)
        out.fill_(float("nan"))
        graph.replay()
        wrong.append(int((out != expected(x, topk.ids, context.size)).sum()))
    return wrong


def two_at_once(context: RankContext) -> int:
    """Two geometries and two layers of one geometry, calls nested in each other; wrong elements."""
    shapes = [(256, 2, 32), (256, 2, 32), (7168, 8, 16)]
    world = context.world(timeout_s=30.0)
    dispatchers = [
        make_dispatcher("symm", world, moe(H, K), RuntimeConfig(max_tokens_per_rank=R), layer=layer)
        for layer, (H, K, R) in enumerate(shapes)
    ]
    world.warmup(*dispatchers)
    generator = torch.Generator("cuda").manual_seed(90 + context.rank)
    wrong = 0
    for _ in range(5):
        open_calls = []
        for dispatcher, (H, K, R) in zip(dispatchers, shapes, strict=True):
            x, topk = batch(generator, R - context.rank, H, K)
            open_calls.append((dispatcher, x, topk, dispatcher.dispatch(x, topk, R)))
        for dispatcher, x, topk, sent in reversed(open_calls):
            out = dispatcher.combine(stand_in(sent, dispatcher, context.rank), sent.handle)
            wrong += int((out != expected(x, topk.ids, context.size)).sum())
    for dispatcher in dispatchers:
        dispatcher.close()
    return wrong


def _caught(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except EprtError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def refusals(context: RankContext) -> dict[str, tuple[str, str]]:
    """What bad calls raise, each followed by a good call that must work; `wrong` counts the good calls' elements."""
    H, K, capacity = 128, 2, 8
    dispatcher = symm(context, H, K, capacity, validate="full")
    generator = torch.Generator("cuda").manual_seed(context.rank)
    found: dict[str, tuple[str, str]] = {}
    wrong = 0

    def good() -> None:
        nonlocal wrong
        x, topk = batch(generator, context.rank, H, K)
        sent = dispatcher.dispatch(x, topk, capacity)
        out = dispatcher.combine(stand_in(sent, dispatcher, context.rank), sent.handle)
        wrong += int((out != expected(x, topk.ids, context.size)).sum())

    def check(name: str, call: Callable[[], object]) -> None:
        found[name] = _caught(call)
        good()

    big, big_topk = batch(generator, capacity + context.rank, H, K)
    check("over_capacity", lambda: dispatcher.dispatch(big, big_topk, None))
    x, topk = batch(generator, 3, H, K)
    check("unequal_r", lambda: dispatcher.dispatch(x, topk, 4 + context.rank % 2))
    check("float32", lambda: dispatcher.dispatch(x.float(), topk, capacity))
    handles = [dispatcher.dispatch(x, topk, capacity).handle for _ in range(2)]
    found["third_dispatch"] = _caught(lambda: dispatcher.dispatch(x, topk, capacity))
    for handle in handles:
        handle.close()
    check("combine_after_close", lambda: dispatcher.combine(x, handles[0]))
    sent = dispatcher.dispatch(x, topk, capacity)
    check("output_shape", lambda: dispatcher.combine(x, sent.handle))
    dispatcher.combine(stand_in(sent, dispatcher, context.rank), sent.handle)
    check("combine_twice", lambda: dispatcher.combine(x, sent.handle))
    own = make_dispatcher("symm", context.world(), moe(H, K), RuntimeConfig(max_tokens_per_rank=capacity))
    own.close()
    check("closed", lambda: own.dispatch(x, topk, capacity))
    found["wrong"] = (str(wrong), "")
    return found


def unequal_rows_unchecked(context: RankContext) -> tuple[str, str]:
    """validate="cheap" compares nothing beforehand: the kernels find a different R, and the next call raises."""
    world = context.world(timeout_s=5.0)
    dispatcher = make_dispatcher("symm", world, moe(128, 2), RuntimeConfig(max_tokens_per_rank=8))
    world.warmup(dispatcher)
    x, topk = batch(torch.Generator("cuda").manual_seed(0), 3, 128, 2)
    sent = dispatcher.dispatch(x, topk, 4 + context.rank % 2)
    torch.cuda.synchronize()
    return _caught(lambda: dispatcher.combine(stand_in(sent, dispatcher, context.rank), sent.handle))


def steps_without(context: RankContext, victim: int, how: str) -> None:
    """The victim dies, or sleeps past the limit, before its fifth dispatch; the others' calls raise RankLost."""
    world = context.world(timeout_s=3.0)
    dispatcher = make_dispatcher("symm", world, moe(128, 2), RuntimeConfig(max_tokens_per_rank=8))
    world.warmup(dispatcher)
    x, topk = batch(torch.Generator("cuda").manual_seed(context.rank), 3, 128, 2)
    for step in range(10):
        world.step = step
        if step == 5 and context.rank == victim:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(6.0)
        sent = dispatcher.dispatch(x, topk, 8)
        dispatcher.combine(stand_in(sent, dispatcher, context.rank), sent.handle)
        done = torch.cuda.Event()
        done.record()
        while not done.query():  # a host that waits like this hears of a dead peer before the kernel's limit
            dispatcher.check_peers()
            time.sleep(1e-3)


def how_it_ended(context: RankContext, victim: int) -> tuple[str, str, float]:
    """Error, text and seconds of `steps_without` a rank that comes too late."""
    started = time.monotonic()
    kind, text = _caught(lambda: steps_without(context, victim, "sleeps"))
    return kind, text, time.monotonic() - started
