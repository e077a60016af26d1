"""What every dispatcher has to survive, as jobs for its ranks: on GPUs from test_dispatchers.py and, in CI, on gloo
ranks from tests/conformance/test_gpu_jobs_on_gloo.py. No pytest here: the ranks import this module.

Results are right bit for bit or wrong. Tokens are whole numbers up to 7, weights 1/8 or 1/4, an expert multiplies by 1
or 2: with a top-k of 8 at most 7 * 32 eighths come together, which bf16's 8 bits hold exactly. So do all partial sums,
wherever a dispatcher rounds: NCCL adds in bf16, the others in float32, DeepEP weights last.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from eprt.config import MoEConfig, PayloadFormat, RuntimeConfig, TokenFormat
from eprt.dispatch import DISPATCHERS, Dispatched, Dispatcher, make_dispatcher
from eprt.quant import decode_payload, encode_payload
from eprt.ranks.launcher import RankContext
from eprt.tokens import FlatTokens, TopK
from eprt.world import World
from support.builders import caught, recorded

Pair = tuple[str, TokenFormat]

PAIRS: list[Pair] = [(name, token_format) for name, spec in DISPATCHERS.items() for token_format in spec.formats]
E = 16
DIGITS = 4  # of an expert's number


# ---- dispatchers, tokens, and what must come back -----------------------------------------------------------------


def moe(hidden_size: int = 128, top_k: int = 2, num_experts: int = E) -> MoEConfig:
    return MoEConfig(num_experts=num_experts, top_k=top_k, hidden_size=hidden_size, intermediate_size=64)


def runtime_of(capacity: int = 64, **runtime: Any) -> RuntimeConfig:
    return RuntimeConfig(max_tokens_per_rank=capacity, **runtime)


def make(pair: Pair, world: World, H: int, K: int, capacity: int, layer: int = 0, **runtime: Any) -> Dispatcher:
    return make_dispatcher(pair[0], world, moe(H, K), runtime_of(capacity, **runtime), pair[1], layer)


def dispatcher_of(context: RankContext, pair: Pair, H: int, K: int, capacity: int, **runtime: Any) -> Dispatcher:
    """One for each set of arguments, kept from job to job."""
    key = ("dispatcher", pair, H, K, capacity, *sorted(runtime.items()))
    if key not in context.cache:
        world = context.world(timeout_s=30.0)  # warm, so not the World of the checks, which make dispatchers as they go
        context.cache[key] = make(pair, world, H, K, capacity, **runtime)
        world.warmup(context.cache[key])
    return context.cache[key]


def generator_of(world: World, seed: int) -> torch.Generator:
    return torch.Generator(world.device).manual_seed(100 * seed + world.rank)


def batch(generator: torch.Generator, T: int, H: int, K: int) -> tuple[torch.Tensor, TopK]:
    """Random tokens; a tenth of the slots name no expert and carry a weight that must not count."""
    on = {"device": generator.device, "generator": generator}
    x = torch.randint(-7, 8, (T, H), **on).bfloat16()
    ids = torch.rand(T, E, **on).topk(K, dim=1).indices
    weights = torch.randint(1, 3, (T, K), **on) / 8
    none = torch.rand(T, K, **on) < 0.1
    return x, TopK(torch.where(none, E, ids).int(), torch.where(none, 2.0**20, weights))


def factors(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[N, K] slots -> [N, 4], their weighted sums of what each expert multiplies columns c, c + 4, ... by: 2 where
    digit c of its number in base 2 is 1, else 1. So four columns tell every expert from every other."""
    digits = ids[..., None] >> torch.arange(DIGITS, device=ids.device) & 1
    return (torch.where(ids < E, weights, 0.0)[..., None] * (1 + digits)).sum(1)


def scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """x [..., H] times factor [..., 4], repeated over the columns."""
    return (x.unflatten(-1, (-1, DIGITS)) * factor[..., None, :]).flatten(-2).to(x.dtype)


def unwritten(tokens: FlatTokens) -> float:
    """What stands in rows for which an executor has nothing to do."""
    return 0.0 if tokens.every_row_read else torch.nan


def stand_in(sent: Dispatched, dispatcher: Dispatcher) -> torch.Tensor:
    """The experts, in the output buffer if there is one. What need not be written is NaN."""
    tokens, shard = sent.tokens, dispatcher.shard
    x = decode_payload(tokens.hidden)
    if isinstance(tokens, FlatTokens):
        written = (tokens.ids < E).any(1, keepdim=True)
        y = scaled(x, factors(tokens.ids, tokens.weights))
        y = torch.where(written, y, unwritten(tokens))
    else:
        experts = torch.arange(shard.first_expert, shard.end_expert, device=x.device)[:, None]
        written = torch.arange(x.shape[1], device=x.device) < tokens.counts[:, None]
        y = scaled(x, factors(experts, torch.ones_like(experts))[:, None])
        y = torch.where(written[..., None], y, torch.nan)
    out = dispatcher.output_buffer(sent.handle)
    return y if out is None else out.copy_(y)


def wrong_rows(out: torch.Tensor, x: torch.Tensor, topk: TopK) -> torch.Tensor:
    """How many rows aren't what all experts together make of x; rows without an expert must be 0."""
    return (out != scaled(x, factors(topk.ids, topk.weights))).any(1).sum()


def far_rows(out: torch.Tensor, x: torch.Tensor, topk: TopK, payload: PayloadFormat) -> torch.Tensor:
    """How many rows are further than bf16's roundings (2^-9 of a number, three times) from what all experts together
    make of x as it is packed on the CPU."""
    packed = decode_payload(encode_payload(x.cpu(), payload)).to(x.device)
    expected = scaled(packed, factors(topk.ids, topk.weights)).float()
    return (~((out.float() - expected).norm(dim=1) <= 1e-2 * expected.norm(dim=1))).sum()


def call(dispatcher: Dispatcher, x: torch.Tensor, topk: TopK, R: int | None) -> torch.Tensor:
    sent = dispatcher.dispatch(x, topk, R)
    return dispatcher.combine(stand_in(sent, dispatcher), sent.handle)


def good_call(dispatcher: Dispatcher, generator: torch.Generator, T: int, R: int | None) -> int:
    """Wrong rows of one call with T fresh tokens."""
    x, topk = batch(generator, T, dispatcher.config.hidden_size, dispatcher.config.top_k)
    return int(wrong_rows(call(dispatcher, x, topk, R), x, topk))


# ---- calls in a row ---------------------------------------------------------------------------------------------


def schedule(size: int, steps: int, capacity: int, delay_share: float) -> Iterator[tuple[list[int], int, int, float]]:
    """Counts, R, who is late and by how many seconds; the same on every rank by its seed."""
    draw = random.Random(7)
    for _ in range(steps):
        counts = [draw.choice((0, 1, draw.randint(0, capacity), capacity)) for _ in range(size)]
        late, pause = draw.randrange(size), draw.random() * 0.05
        yield counts, draw.randint(max(*counts, 1), capacity), late, pause * (draw.random() < delay_share)


def random_steps(
    context: RankContext, pair: Pair, steps: int, delay_share: float, H: int, K: int, capacity: int
) -> int:  # fmt: skip
    """Random counts and R, a random rank late by up to 50 ms in `delay_share` of the steps; wrong rows."""
    dispatcher = dispatcher_of(context, pair, H, K, capacity)
    generator = generator_of(dispatcher.world, 1)
    wrong = torch.zeros((), dtype=torch.int64, device=generator.device)  # read once: steps overlap as in real use
    for counts, R, late, pause in schedule(context.size, steps, capacity, delay_share):
        if late == context.rank:
            time.sleep(pause)
        x, topk = batch(generator, counts[context.rank], H, K)
        wrong += wrong_rows(call(dispatcher, x, topk, R), x, topk)
    return int(wrong)


def sums_of_any_numbers(context: RankContext, pair: Pair, H: int, K: int, rows: list[int]) -> int:
    """Tokens of all 8 bits, times 2**p on rank p, unweighted: float32 holds the sums exactly, and the one rounding is
    the last. For dispatchers of flat tokens that don't add in bf16. Wrong rows."""
    dispatcher = dispatcher_of(context, pair, H, K, max(rows))
    generator = generator_of(dispatcher.world, 2)
    wrong = 0
    for R in rows:
        _, topk = batch(generator, R, H, K)
        x = torch.randn(R, H, device=generator.device, generator=generator).bfloat16()
        sent = dispatcher.dispatch(x, topk, R)
        written = (sent.tokens.ids < E).any(1, keepdim=True)
        y = torch.where(written, sent.tokens.hidden.data * 2.0**context.rank, unwritten(sent.tokens))
        out = dispatcher.combine(y, sent.handle)
        owner = torch.where(topk.ids < E, topk.ids // (E // context.size), -1)
        ranks = torch.arange(context.size, device=x.device)
        total = ((owner[..., None] == ranks).any(1) * 2.0**ranks).sum(1, keepdim=True)
        wrong += int((out != (x.float() * total).bfloat16()).any(1).sum())
    return wrong


def replay(
    context: RankContext, pair: Pair, H: int, K: int, rounds: list[list[int]], payload: PayloadFormat | None = None
) -> list[int]:
    """Capture once at R rows, replay with new data and counts; wrong rows of each replay."""
    R = 64
    dispatcher = dispatcher_of(context, pair, H, K, R, **({} if payload is None else {"payload": payload}))
    generator = generator_of(dispatcher.world, 3)
    x, topk = batch(generator, R, H, K)
    wrong = []
    out, play = recorded(lambda: call(dispatcher, x, topk, R), generator.device)
    for counts in rounds:
        fresh_x, fresh = batch(generator, R, H, K)
        fresh.ids[counts[context.rank] :] = E  # an idle row: no expert
        x.copy_(fresh_x)
        topk.ids.copy_(fresh.ids)
        topk.weights.copy_(fresh.weights)
        out.fill_(torch.nan)
        play()
        wrong.append(int(wrong_rows(out, x, topk) if payload is None else far_rows(out, x, topk, payload)))
    return wrong


def several_at_once(context: RankContext, pair: Pair) -> int:
    """Two layers of one geometry, another geometry, and another World of the first one, calls nested in each other;
    then what is left when one of each has closed. Wrong rows."""
    device = context.world().device
    worlds = [World.from_group(dist.group.WORLD, device) for _ in range(2)]
    shapes = [(2048, 2, 32), (2048, 2, 32), (7168, 8, 16), (2048, 2, 32)]
    homes = [worlds[0], worlds[0], worlds[0], worlds[1]]
    dispatchers = [
        make(pair, home, *shape, layer=layer) for layer, (home, shape) in enumerate(zip(homes, shapes, strict=True))
    ]
    worlds[0].warmup(*dispatchers[:3])
    worlds[1].warmup(dispatchers[3])
    generator = generator_of(worlds[0], 4)
    wrong = 0
    for _ in range(5):
        open_calls = []
        for dispatcher, (H, K, R) in zip(dispatchers, shapes, strict=True):
            x, topk = batch(generator, R - context.rank, H, K)
            open_calls.append((dispatcher, x, topk, dispatcher.dispatch(x, topk, R)))
        for dispatcher, x, topk, sent in reversed(open_calls):
            wrong += int(wrong_rows(dispatcher.combine(stand_in(sent, dispatcher), sent.handle), x, topk))
    dispatchers[1].close()
    worlds[0].barrier()
    worlds[1].close()
    for dispatcher, (_, _, R) in ((dispatchers[0], shapes[0]), (dispatchers[2], shapes[2])):
        wrong += good_call(dispatcher, generator, R - context.rank, R)
        dispatcher.close()
    worlds[0].barrier()
    worlds[0].close()
    return wrong


# ---- bad calls --------------------------------------------------------------------------------------------------

NO_LIMIT = ("none", "torch")  # of open calls: they share no memory

# What is wrong -> error type, words of its text.
REFUSED = {
    "over_capacity": ("CapacityError", "max_tokens_per_rank >= "),
    "unequal_r": ("WorldMismatch", "tokens_per_rank"),
    "float64_on_rank_1": ("InputError", "rank 1: hidden_states is (3, 2048) torch.float64"),
    "float32": ("InputError", "takes torch.bfloat16 tokens"),
    "third_dispatch": ("UsageError", "2 dispatches of this geometry are open"),
    "combine_after_close": ("UsageError", "already closed"),
    "output_shape_on_rank_1": ("InputError", "rank 1: expert_output is (3, 2047)"),
    "combine_twice": ("UsageError", "already combined"),
    "foreign_handle": ("UsageError", "handle of another dispatcher"),
    "closed_dispatcher": ("UsageError", "the dispatcher is closed"),
    "closed_world": ("UsageError", "the world is closed"),
    "good_calls": ("0", ""),
}


def refused(pair: Pair) -> dict[str, tuple[str, str]]:
    """REFUSED, less what this dispatcher allows."""
    allowed = [what for what in ("third_dispatch",) if pair[0] in NO_LIMIT]
    allowed += ["float32"] * ("f32" in DISPATCHERS[pair[0]].payloads)
    return {what: ("nothing", "") if what in allowed else said for what, said in REFUSED.items()}


def unexpected(by_rank: list[dict[str, tuple[str, str]]], pair: Pair) -> list[str]:
    """Where `refusals` of any rank isn't what `refused` says, or isn't what the other ranks say."""
    expected = refused(pair)
    return [
        f"rank {rank}: {what} raised {kind} {text}"
        for rank, found in enumerate(by_rank)
        for what, (kind, text) in found.items()
        if kind != expected[what][0] or expected[what][1] not in text or (kind, text) != by_rank[0][what]
    ] + [f"{what} was not tried" for what in expected.keys() - by_rank[0].keys()]


def refusals(context: RankContext, pair: Pair) -> dict[str, tuple[str, str]]:
    """What bad calls raise, each followed by a good call that must work: `good_calls` counts those calls' rows."""
    H, K, capacity = 2048, 2, 8
    dispatcher = dispatcher_of(context, pair, H, K, capacity, validate="full")
    world = dispatcher.world
    generator = generator_of(world, 5)
    found: dict[str, tuple[str, str]] = {}
    wrong = 0

    def check(what: str, function: Callable[[], object]) -> None:
        nonlocal wrong
        found[what] = caught(function)
        wrong += good_call(dispatcher, generator, context.rank, capacity)

    big = batch(generator, capacity + context.rank, H, K)
    check("over_capacity", lambda: dispatcher.dispatch(*big, None))
    x, topk = batch(generator, 3, H, K)
    check("unequal_r", lambda: dispatcher.dispatch(x, topk, 4 + context.rank % 2))
    mixed = x.double() if context.rank == 1 else x
    check("float64_on_rank_1", lambda: dispatcher.dispatch(mixed, topk, capacity))
    check("float32", lambda: dispatcher.dispatch(x.float(), topk, capacity).handle.close())
    handles = [dispatcher.dispatch(x, topk, capacity).handle for _ in range(2)]
    found["third_dispatch"] = caught(lambda: handles.append(dispatcher.dispatch(x, topk, capacity).handle))
    for handle in handles:
        handle.close()
    check("combine_after_close", lambda: dispatcher.combine(x, handles[0]))
    sent = dispatcher.dispatch(x, topk, capacity)
    check_output = x[:, 1:] if context.rank == 1 else stand_in(sent, dispatcher)
    check("output_shape_on_rank_1", lambda: dispatcher.combine(check_output, sent.handle))
    wrong += int(wrong_rows(dispatcher.combine(stand_in(sent, dispatcher), sent.handle), x, topk))
    check("combine_twice", lambda: dispatcher.combine(x, sent.handle))
    other_world = World.from_group(dist.group.WORLD, world.device)
    other = make(pair, other_world, H, K, capacity)
    other.close()
    check("closed_dispatcher", lambda: other.dispatch(x, topk, capacity))
    orphan = make(pair, other_world, H, K, capacity)
    sent = dispatcher.dispatch(x, topk, capacity)
    check("foreign_handle", lambda: orphan.combine(x, sent.handle))
    sent.handle.close()
    world.barrier()
    other_world.close()
    check("closed_world", lambda: orphan.dispatch(x, topk, capacity))
    found["good_calls"] = (str(wrong), "")
    return found


@dataclass(frozen=True)
class Beyond:
    """Something a dispatcher can't carry, and the limit in the words of its refusal."""

    pair: Pair
    says: str
    config: MoEConfig = field(default_factory=moe)
    moe_tp_size: int = 1
    runtime: RuntimeConfig = field(default_factory=runtime_of)

    def __str__(self) -> str:
        return f"{self.pair[0]}-{self.says}"


SYMM, FLASHINFER, DEEPEP = [("symm", "flat"), ("flashinfer", "flat"), ("deepep", "expert_major")]
BEYOND = (
    Beyond(SYMM, "at most 1048575 tokens a rank", runtime=runtime_of(capacity=1 << 20)),
    Beyond(SYMM, "payload f32: carries bf16, fp8_block, nvfp4 only", runtime=runtime_of(payload="f32")),
    Beyond(FLASHINFER, "top-k at most 22, the model has 23", moe(top_k=23, num_experts=32)),
    Beyond(FLASHINFER, "can't send one token to the 2 MoE-TP ranks", moe_tp_size=2),
    Beyond(FLASHINFER, "payload f32: carries bf16, fp8_block, nvfp4 only", runtime=runtime_of(payload="f32")),
    Beyond(DEEPEP, "top-k at most 11, the model has 12", moe(top_k=12)),
    Beyond(DEEPEP, "hidden size at most 8192, the model has 8320", moe(hidden_size=8320)),
    Beyond(DEEPEP, "at most 1024 tokens a rank", runtime=runtime_of(capacity=1025)),
    Beyond(DEEPEP, "payload nvfp4: carries bf16, fp8_block only", runtime=runtime_of(payload="nvfp4")),
    Beyond(DEEPEP, "can't send one token to the 2 MoE-TP ranks", moe_tp_size=2),
)


def not_built(context: RankContext, beyond: Beyond) -> tuple[str, str]:
    """What making a dispatcher beyond a limit raises."""
    name, token_format = beyond.pair
    world = context.world(moe_tp_size=beyond.moe_tp_size)
    return caught(lambda: make_dispatcher(name, world, beyond.config, beyond.runtime, token_format).close())


def one_rank_skips_a_combine(context: RankContext, pair: Pair) -> tuple[str, str, int]:
    """Rank 1 goes on to its next dispatch where the others combine, and headers are compared: what that raises here,
    and wrong rows of the call that follows."""
    dispatcher = dispatcher_of(context, pair, 2048, 2, 8, validate="full")
    generator = generator_of(dispatcher.world, 6)
    x, topk = batch(generator, 5, 2048, 2)
    sent = dispatcher.dispatch(x, topk, 8)
    if context.rank == 1:
        said = caught(lambda: dispatcher.dispatch(x, topk, 8))
    else:
        said = caught(lambda: dispatcher.combine(stand_in(sent, dispatcher), sent.handle))
    sent.handle.close()
    return *said, good_call(dispatcher, generator, context.rank, 8)
