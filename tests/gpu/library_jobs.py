"""Jobs that run inside the ranks of tests/gpu/test_library_dispatchers.py. No pytest here: the ranks import this."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from eprt.config import MoEConfig, RuntimeConfig
from eprt.conformance.harness import RankContext
from eprt.dispatch import DISPATCHERS, Dispatched, Dispatcher, make_dispatcher
from eprt.errors import EprtError
from eprt.quant import decode_payload, encode_payload
from eprt.tokens import FlatTokens, TopK
from eprt.world import World

E = 16
TOLERANCE = 1e-2  # of a row: bf16 outputs of the executors, and of combine
ONE_STEP = 3e-2  # of a row whose largest number was quantised to the neighbouring FP8 code


def moe(hidden_size: int, top_k: int) -> MoEConfig:
    return MoEConfig(num_experts=E, top_k=top_k, hidden_size=hidden_size, intermediate_size=64)


def make(
    name: str, world: World, hidden_size: int, top_k: int, capacity: int, layer: int = 0, **runtime: Any
) -> Dispatcher:
    settings = RuntimeConfig(max_tokens_per_rank=capacity, **runtime)
    return make_dispatcher(name, world, moe(hidden_size, top_k), settings, layer=layer)


def batch(generator: torch.Generator, T: int, H: int, K: int) -> tuple[torch.Tensor, TopK]:
    """Random tokens; a tenth of the slots name no expert and carry a weight that must not count."""
    device = generator.device
    x = torch.randn(T, H, device=device, generator=generator).bfloat16()
    ids = torch.rand(T, E, device=device, generator=generator).topk(K, dim=1).indices.int()
    weights = torch.rand(T, K, device=device, generator=generator)
    none = torch.rand(T, K, device=device, generator=generator) < 0.1
    return x, TopK(torch.where(none, E, ids).int(), torch.where(none, 1e6, weights))


def stand_in(sent: Dispatched, dispatcher: Dispatcher, rank: int) -> torch.Tensor:
    """Every expert of rank p: x * 2**p, in the output buffer if there is one. What need not be written is NaN."""
    tokens = sent.tokens
    x = decode_payload(tokens.hidden).float() * 2.0**rank
    if isinstance(tokens, FlatTokens):
        valid = tokens.ids < E
        x = x * torch.where(valid, tokens.weights, 0.0).sum(1, keepdim=True)
        x = torch.where(valid.any(1, keepdim=True), x, torch.nan)
    else:
        row = torch.arange(x.shape[1], device=x.device)
        x = torch.where(row[None, :, None] < tokens.counts[:, None, None], x, torch.nan)
    out = dispatcher.output_buffer(sent.handle)
    return x.bfloat16() if out is None else out.copy_(x)


def wrong_rows(out: torch.Tensor, x: torch.Tensor, topk: TopK, size: int, tolerance: float = TOLERANCE) -> torch.Tensor:
    """How many rows of `out` aren't x * sum(weight * 2**owner); rows without an expert must be 0."""
    scale = 2.0 ** (topk.ids // (E // size)).float()
    expected = x.float() * torch.where(topk.ids < E, topk.weights * scale, 0.0).sum(1, keepdim=True)
    error = (out.float() - expected).norm(dim=1)
    return (~(error <= tolerance * expected.norm(dim=1))).sum()


def call(dispatcher: Dispatcher, x: torch.Tensor, topk: TopK, R: int | None) -> torch.Tensor:
    sent = dispatcher.dispatch(x, topk, R)
    return dispatcher.combine(stand_in(sent, dispatcher, dispatcher.world.rank), sent.handle)


def random_steps(
    context: RankContext, name: str, steps: int, delay_s: float, H: int, K: int, capacity: int
) -> int:  # fmt: skip
    """Random counts and R, one rank late now and then; wrong rows. Ranks agree on the schedule by its seed."""
    dispatcher = make(name, context.world(), H, K, capacity)
    schedule, generator = random.Random(7), torch.Generator("cuda").manual_seed(context.rank)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(steps):
        counts = [schedule.choice((0, 1, schedule.randint(0, capacity), capacity)) for _ in range(context.size)]
        R = schedule.randint(max(*counts, 1), capacity)
        late, pause = schedule.randrange(context.size), schedule.random() * delay_s
        if schedule.random() < 0.05 and late == context.rank:
            time.sleep(pause)
        x, topk = batch(generator, counts[context.rank], H, K)
        wrong += wrong_rows(call(dispatcher, x, topk, R), x, topk, context.size)
    found = int(wrong)
    dispatcher.close()
    return found


def replay(context: RankContext, name: str, H: int, K: int, rounds: list[list[int]]) -> list[int]:
    """Capture once at R rows, replay with new data and counts; wrong rows of each replay."""
    R = 64
    dispatcher = make(name, context.world(), H, K, R)
    dispatcher.warmup()
    generator = torch.Generator("cuda").manual_seed(50 + context.rank)
    x, topk = batch(generator, R, H, K)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(dispatcher, x, topk, R)
    wrong: list[int] = []
    for counts in rounds:
        fresh_x, fresh = batch(generator, R, H, K)
        fresh.ids[counts[context.rank] :] = E  # an idle row: no expert
        x.copy_(fresh_x)
        topk.ids.copy_(fresh.ids)
        topk.weights.copy_(fresh.weights)
        out.fill_(torch.nan)
        graph.replay()
        wrong.append(int(wrong_rows(out, x, topk, context.size)))
    dispatcher.close()
    return wrong


def several_at_once(context: RankContext, name: str) -> int:
    """Two layers of one geometry, another geometry, and another World of the first one; wrong rows."""
    world = context.world()
    other = World.from_group(dist.group.WORLD, world.device)
    shapes = [(2048, 2, 32), (2048, 2, 32), (7168, 8, 16), (2048, 2, 32)]
    homes = [world, world, world, other]
    dispatchers = [
        make(name, home, *shape, layer=layer) for layer, (home, shape) in enumerate(zip(homes, shapes, strict=True))
    ]
    generator = torch.Generator("cuda").manual_seed(90 + context.rank)
    wrong = 0
    for _ in range(5):
        open_calls = []
        for dispatcher, (H, K, R) in zip(dispatchers, shapes, strict=True):
            x, topk = batch(generator, R - context.rank, H, K)
            open_calls.append((dispatcher, x, topk, dispatcher.dispatch(x, topk, R)))
        for dispatcher, x, topk, sent in reversed(open_calls):
            out = dispatcher.combine(stand_in(sent, dispatcher, context.rank), sent.handle)
            wrong += int(wrong_rows(out, x, topk, context.size))
    dispatchers[1].close()
    world.barrier()
    other.close()
    for dispatcher, (H, K, R) in zip((dispatchers[0], dispatchers[2]), (shapes[0], shapes[2]), strict=True):
        x, topk = batch(generator, R - context.rank, H, K)
        wrong += int(wrong_rows(call(dispatcher, x, topk, R), x, topk, context.size))
        dispatcher.close()
    return wrong


def _caught(function: Callable[[], object]) -> tuple[str, str]:
    try:
        function()
    except EprtError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def refusals(context: RankContext, name: str) -> dict[str, tuple[str, str]]:
    """What bad calls raise, each followed by a good call that must work; `wrong` counts the good calls' rows."""
    H, K, capacity = 2048, 2, 8
    dispatcher = make(name, context.world(), H, K, capacity, validate="full")
    generator = torch.Generator("cuda").manual_seed(context.rank)
    found: dict[str, tuple[str, str]] = {}
    wrong = 0

    def good() -> None:
        nonlocal wrong
        x, topk = batch(generator, context.rank, H, K)
        wrong += int(wrong_rows(call(dispatcher, x, topk, capacity), x, topk, context.size))

    def check(what: str, function: Callable[[], object]) -> None:
        found[what] = _caught(function)
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
    own = make(name, context.world(), H, K, 2 * capacity)
    own.close()
    check("closed", lambda: own.dispatch(x, topk, capacity))
    huge = make(name, context.world(), 8192, K, {"flashinfer": 1 << 22, "deepep": 1024}[name])
    hog = torch.empty(torch.cuda.mem_get_info()[0] - (1 << 29), dtype=torch.uint8, device="cuda")
    found["no_memory"] = _caught(lambda: huge.dispatch(*batch(generator, 1, 8192, K), 1))
    del hog
    torch.cuda.empty_cache()
    good()
    dispatcher.close()
    found["wrong"] = (str(wrong), "")
    return found


def one_rank_drops_a_call(context: RankContext, name: str) -> tuple[bool, int]:
    """Rank 1 closes its handle without combining: whether exactly the tokens that asked it are NaN, and wrong rows of
    the call that follows."""
    H, K = 2048, 2
    dispatcher = make(name, context.world(), H, K, 16)
    generator = torch.Generator("cuda").manual_seed(7 + context.rank)
    x, topk = batch(generator, 13, H, K)
    sent = dispatcher.dispatch(x, topk, 16)
    honest = True
    if context.rank == 1:
        sent.handle.close()
    else:
        out = dispatcher.combine(stand_in(sent, dispatcher, context.rank), sent.handle)
        honest = torch.equal(out.isnan().all(1), (topk.ids // (E // context.size) == 1).any(1))
    wrong = int(wrong_rows(call(dispatcher, x, topk, 16), x, topk, context.size))
    dispatcher.close()
    return honest, wrong


def one_rank_dies(context: RankContext, name: str, victim: int) -> tuple[str, str]:
    """The victim is killed before its fifth dispatch; what the others' calls raise."""
    dispatcher = make(name, context.world(timeout_s=5.0), 2048, 2, 8)
    x, topk = batch(torch.Generator("cuda").manual_seed(context.rank), 3, 2048, 2)

    def steps() -> None:
        for step in range(10):
            if step == 5 and context.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            call(dispatcher, x, topk, 8)
            torch.cuda.synchronize()

    return _caught(steps)


def overlapped(context: RankContext, H: int, K: int) -> tuple[str, int]:
    """DeepEP: other work between the sends and the arrival; what combine without wait raises, and wrong rows."""
    dispatcher = make("deepep", context.world(), H, K, 32)
    generator = torch.Generator("cuda").manual_seed(3 + context.rank)
    wrong, early = 0, ""
    for T in (5, 0, 32, 17):
        x, topk = batch(generator, (T + context.rank) % 33, H, K)
        sent = dispatcher.dispatch(x, topk, 32, wait=False)
        early = _caught(lambda sent=sent, x=x: dispatcher.combine(x, sent.handle))[0]
        torch.randn(1024, 1024, device="cuda").matmul(torch.randn(1024, 1024, device="cuda"))
        sent.handle.wait()
        sent.handle.wait()
        out = dispatcher.combine(stand_in(sent, dispatcher, context.rank), sent.handle)
        wrong += int(wrong_rows(out, x, topk, context.size))
    dispatcher.close()
    return early, wrong


def quantised_by_deepep(context: RankContext, H: int, K: int, wait: bool) -> int:
    """FP8 tokens: wrong rows, against this project's own encoding of the same tokens."""
    dispatcher = make("deepep", context.world(), H, K, 32, payload="fp8_block")
    generator = torch.Generator("cuda").manual_seed(3 + context.rank)
    wrong = 0
    for T in (5, 0, 32, 17):
        x, topk = batch(generator, (T + context.rank) % 33, H, K)
        sent = dispatcher.dispatch(x, topk, 32, wait=wait)
        sent.handle.wait()
        sent.tokens.check()
        out = dispatcher.combine(stand_in(sent, dispatcher, context.rank), sent.handle)
        ours = decode_payload(encode_payload(x, "fp8_block"))
        wrong += int(wrong_rows(out, ours, topk, context.size, ONE_STEP))
    dispatcher.close()
    return wrong


def sizes(context: RankContext) -> list[str]:
    """Where our arithmetic of buffer sizes differs from the libraries'."""
    import deep_ep
    from flashinfer.comm.trtllm_moe_alltoall import moe_a2a_get_workspace_size_per_rank

    from eprt.dispatch import deepep, flashinfer_workspace

    wrong: list[str] = []
    for W in (2, 4, 8, 63):
        for tokens in (1, 7, 64, 4096):
            ours = flashinfer_workspace.Geometry(W, tokens, 5792, 5760)
            theirs = moe_a2a_get_workspace_size_per_rank(W, tokens, 5792, 5760)
            wrong += [f"flashinfer {ours}: {theirs}"] * (ours.slot_bytes != theirs)
    for W, experts in ((2, 16), (4, 128), (8, 256)):
        for tokens in (1, 64, 1024):
            for hidden in DISPATCHERS["deepep"].hidden_sizes or ():
                theirs = deep_ep.Buffer.get_low_latency_rdma_size_hint(tokens, hidden, W, experts)
                geometry = deepep.Geometry(W, experts, tokens, hidden)
                wrong += [f"deepep {geometry}: {theirs}"] * (geometry.num_bytes != theirs)
    return wrong
