"""Jobs that run inside the ranks of tests/gpu/test_rank_mask_and_fp8_combine.py. No pytest here: the ranks import
this."""

from __future__ import annotations

from typing import Any

import torch

from eprt.config import RuntimeConfig
from eprt.conformance import transport
from eprt.conformance.cases import Batch, Case, Counts, make_batches
from eprt.dispatch import Dispatched, Dispatcher, make_dispatcher
from eprt.quant import decode_payload
from eprt.ranks.launcher import RankContext
from eprt.tokens import FlatTokens, TopK
from support.builders import recorded
from support.jobs.dispatcher_jobs import E, moe

CAPACITY = 32
UNEVEN = Case(Counts("uneven", ((3, 7, 1, 12), (0, 13, 2, 5), (11, 2, 9, 0))), "partly_invalid")
STATIC = Case(Counts("static", ((12,),)), "uniform")
ROWS = 16  # R of the captured calls: more than their tokens


def make(context: RankContext, name: str, hidden_size: int, top_k: int, **runtime: Any) -> Dispatcher:
    settings = RuntimeConfig(max_tokens_per_rank=CAPACITY, **runtime)
    dispatcher = make_dispatcher(name, context.world(), moe(hidden_size, top_k), settings)
    dispatcher.warmup()
    return dispatcher


def without(batch: Batch, rank: int, alive: tuple[bool, ...]) -> Batch:
    """What counts of rank `rank`'s batch: nothing if it is left out, else no slot of a rank that is."""
    if not alive[rank]:
        return Batch(batch.hidden[:0], batch.topk.narrow(0, 0))
    owners = batch.topk.ids // (E // len(alive))
    gone = torch.isin(owners, torch.tensor([r for r, one in enumerate(alive) if not one], dtype=torch.int32))
    return Batch(batch.hidden, TopK(torch.where(gone, E, batch.topk.ids).to(torch.int32), batch.topk.weights))


def plain_experts(sent: Dispatched, out: torch.Tensor | None = None) -> torch.Tensor:
    """Every expert returns its input; the format says who weights. No host sync. Rows without a token are garbage."""
    tokens = sent.tokens
    x = decode_payload(tokens.hidden).float()
    if isinstance(tokens, FlatTokens):
        x = x * torch.where(tokens.ids < E, tokens.weights, 0.0).sum(1, keepdim=True)
    return x.bfloat16() if out is None else out.copy_(x)


def exchange(dispatcher: Dispatcher, call: int, R: int | None) -> list[str]:
    """One call, routed as if all ranks were there; what is wrong with what arrives and returns, bit for bit."""
    world, config = dispatcher.world, dispatcher.config
    batches = make_batches(UNEVEN, call, world.size, config, torch.bfloat16)
    own = batches[world.rank].to(world.device)
    counted = [without(batch, rank, world.alive) for rank, batch in enumerate(batches)]
    sent = dispatcher.dispatch(own.hidden, own.topk, R)
    problems = transport.wrong_arrivals(sent.tokens, counted, dispatcher.shard, None)
    y = transport.scale_experts(sent.tokens, dispatcher.shard, torch.ones(E), torch.bfloat16)
    returned = dispatcher.combine(y, sent.handle).cpu()
    expected = transport.weighted_sums(counted[world.rank], torch.ones(E), None).bfloat16()
    wrong = int((returned != expected).any(1).sum())
    return [f"call {call}: {p}" for p in problems] + [f"call {call}: {wrong} rows came back wrong"] * bool(wrong)


def close(context: RankContext, dispatcher: Dispatcher) -> None:
    """Of the ranks that are left."""
    torch.cuda.synchronize()
    context.world().barrier()
    dispatcher.close()


def left_out(context: RankContext, name: str, hidden_size: int, top_k: int) -> list[str]:
    """All ranks, then all but the last, then (from four on) all but the last and the first; what was wrong."""
    dispatcher = make(context, name, hidden_size, top_k, on_rank_lost="continue")
    last = context.size - 1
    problems = exchange(dispatcher, 0, None) + exchange(dispatcher, 1, CAPACITY)
    for leaving in [last] if context.size < 4 else [last, 0]:
        if context.rank == leaving:
            torch.cuda.synchronize()
            return problems
        context.world().shrink([leaving])
        alive = context.world().alive
        for call, R in enumerate((17, CAPACITY, 13)):
            problems += exchange(dispatcher, call, R)
        torch.cuda.synchronize()
        if name == "deepep":  # the GPU's own view of its mask, in host memory: 1 is left out
            told = dispatcher._memory.given_up.tolist()
            problems += [f"the library's mask is {told} for {alive}"] * (told != [int(not one) for one in alive])
    close(context, dispatcher)
    return problems


class Captured:
    """dispatch, experts, combine of STATIC's tokens in a CUDA graph.

    Args:
        in_workspace: the experts write where the dispatcher wants its output.
    """

    def __init__(self, dispatcher: Dispatcher, in_workspace: bool = True) -> None:
        self.dispatcher = dispatcher
        self.own = self._batch(0).to(dispatcher.world.device)

        def call() -> torch.Tensor:
            sent = dispatcher.dispatch(self.own.hidden, self.own.topk, ROWS)
            y = plain_experts(sent, dispatcher.output_buffer(sent.handle) if in_workspace else None)
            return dispatcher.combine(y, sent.handle)

        call()  # after a change of the mask, one has to come before the capture
        self.out, self._again = recorded(call, dispatcher.world.device)

    def _batch(self, call: int) -> Batch:
        world = self.dispatcher.world
        return make_batches(STATIC, call, world.size, self.dispatcher.config, torch.bfloat16)[world.rank]

    def replay(self, call: int) -> tuple[torch.Tensor, Batch]:
        """What comes back for that call's tokens, and the tokens; on the CPU."""
        batch = self._batch(call)
        self.own.hidden.copy_(batch.hidden)
        self.own.topk.ids.copy_(batch.topk.ids)
        self.own.topk.weights.copy_(batch.topk.weights)
        self.out.fill_(torch.nan)
        self._again()
        return self.out.cpu(), batch


def replayed(context: RankContext, name: str, follows: bool) -> list[str]:
    """Replays before and after the last rank leaves. `follows`: graphs captured before follow the mask; else they are
    captured again."""
    dispatcher = make(context, name, 2880, 4, on_rank_lost="continue")
    captured = Captured(dispatcher)
    problems = _wrong(captured, 1)
    if context.rank < context.size - 1:
        context.world().shrink([context.size - 1])
        captured = captured if follows else Captured(dispatcher)
        for call in (2, 3):
            problems += _wrong(captured, call)
        close(context, dispatcher)
    return problems


def _wrong(captured: Captured, call: int) -> list[str]:
    out, batch = captured.replay(call)
    world, alive = captured.dispatcher.world, captured.dispatcher.world.alive
    expected = transport.weighted_sums(without(batch, world.rank, alive), torch.ones(E), None).bfloat16()
    wrong = int((out != expected).any(1).sum())
    return [f"replay {call} with {alive}: {wrong} rows came back wrong"] * bool(wrong)


def fp8_replayed(context: RankContext, hidden_size: int, top_k: int) -> list[str]:
    """FP8 outputs in a graph, where only odd ranks' experts write into the workspace; what was wrong, bit for bit."""
    dispatcher = make(context, "flashinfer", hidden_size, top_k, combine_payload="fp8")
    captured = Captured(dispatcher, in_workspace=context.rank % 2 == 1)
    problems: list[str] = []
    for call in range(4):
        out, batch = captured.replay(call)
        expected = transport.fp8_sums(batch, dispatcher.shard)
        exact = transport.weighted_sums(batch, torch.ones(E), None)
        wrong = int((out != expected).any(1).sum())
        problems += [f"replay {call}: {wrong} rows came back wrong"] * bool(wrong)
        if torch.equal(out, exact.bfloat16()):
            problems.append(f"replay {call}: nothing was rounded to FP8")
    close(context, dispatcher)
    return problems


def fp8_extremes(context: RankContext) -> list[float]:
    """What comes back where every expert's output is the row below."""
    outputs = [1000.0, -449.0, torch.inf, -torch.inf, torch.nan, 2.0**-11, 1.5 * 2.0**-9, 0.3] * 16
    dispatcher = make(context, "flashinfer", len(outputs), 1, combine_payload="fp8")
    device = dispatcher.world.device
    ids = torch.full((1, 1), (context.rank + 1) % context.size * (E // context.size), dtype=torch.int32, device=device)
    x = torch.ones(1, len(outputs), dtype=torch.bfloat16, device=device)
    sent = dispatcher.dispatch(x, TopK(ids, torch.ones(1, 1, device=device)), 4)
    rows = torch.tensor(outputs, device=device).bfloat16().expand(sent.tokens.hidden.data.shape[0], -1).contiguous()
    returned = dispatcher.combine(rows, sent.handle)[0, :8].tolist()
    close(context, dispatcher)
    return returned
