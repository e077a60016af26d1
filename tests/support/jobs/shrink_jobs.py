"""Jobs for test_shrink.py: ranks are lost, and the others go on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch

from eprt.balance import rebalance
from eprt.config import RuntimeConfig
from eprt.conformance.faults.job import CheckedLayer
from eprt.dispatch import make_dispatcher
from eprt.errors import RankLost
from eprt.placement import ExpertPlacement
from eprt.world import World
from eprt.world.guard import Guard
from eprt.world.shrink import Survivors
from eprt.world.wire import gather_values
from support.builders import die, said, stop_for

LIMIT_S = 4.0


def steps(job: CheckedLayer, first: int, last: int, dies_at: int = -1) -> Survivors | None:
    """Checked steps; what a loss on the way led to, if there was one. Goes on to the last step either way."""
    found, step = None, first
    while step < last:
        if step == dies_at:
            die()
        try:
            job.step(step)
        except RankLost:
            found = job.world.shrink()
            step, last = found.next_step - 1, max(last, found.next_step + 4)
        step += 1
    return found


def one_after_another(context, dispatcher: str, then: str, order: list[int]) -> list[Any]:
    """The ranks of `order` die in turn, in different phases, until the rest is alone."""
    world = context.world(timeout_s=LIMIT_S)
    job = CheckedLayer(world, dispatcher, then)
    seen: list[Any] = []
    step = 0
    for turn, victim in enumerate(order):
        if world.rank == victim:
            job.layer.observe = _dies_in(("dispatch", "experts", "combine")[turn % 3])
        started = time.monotonic()
        while True:
            try:
                job.step(step)
                step += 1
            except RankLost as lost:
                found = world.shrink()
                seen.append((lost.ranks, found.lost, time.monotonic() - started < 2 * LIMIT_S))
                step = found.next_step
                break
        for _ in range(5):
            job.step(step)
            step += 1
    world.close()
    return seen


def _dies_in(phase: str) -> Callable[[str], Any]:
    return lambda entered: die() if entered == phase else nullcontext()


def shared_experts_and_tokens(context, attention_tp: int, moe_tp: int, victim: int) -> tuple[tuple[int, ...], str]:
    world = context.world(attention_tp_size=attention_tp, moe_tp_size=moe_tp, timeout_s=LIMIT_S)
    job = CheckedLayer(world, "torch", "continue")
    job.step(0)
    text = said(lambda: steps(job, 1, 8, dies_at=4 if world.rank == victim else -1))
    lost = tuple(rank for rank, alive in enumerate(world.alive) if not alive)
    return lost, text


def replicas_take_over(context, dispatcher: str, victim: int) -> bool:
    """Every expert has a second slot on the next rank: nothing is missing afterwards, and the formula says so."""
    world = context.world(timeout_s=LIMIT_S)
    own = [[2 * r, 2 * r + 1, 2 * r - 2, 2 * r - 1] for r in range(world.size)]
    slots = tuple(expert % (2 * world.size) for some in own for expert in some)
    placement = ExpertPlacement(2 * world.size, world.parallel, slots)
    job = CheckedLayer(world, dispatcher, "continue", placement=placement)
    steps(job, 0, 8, dies_at=4 if world.rank == victim else -1)
    return all(job.is_there(expert) for expert in range(2 * world.size))


def wakes_up_too_late(context, victim: int) -> list[str]:
    """Stopped until the others have gone on: it hears that it is out, and can't go on beside them."""
    limit_s = 3.0
    world = context.world(timeout_s=limit_s)
    job = CheckedLayer(world, "none", "continue")
    job.step(0)
    if world.rank == victim:
        stop_for(1.5 * limit_s)
    if world.rank != victim:
        steps(job, 1, 12)
        time.sleep(limit_s)  # still there when it wakes
        return [str(steps(job, world.step_number + 1, world.step_number + 3))]
    heard = said(lambda: [job.step(step) for step in range(1, 100)])
    return [heard, said(world.shrink)]


def without_the_store(context, port: int) -> tuple[Any, ...]:
    """Rank 0, which dies, served it."""
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")
    world = World.from_env("cpu", timeout_s=LIMIT_S)
    job = CheckedLayer(world, "none", "continue")
    found = steps(job, 0, 8, dies_at=4 if world.rank == 0 else -1)
    world.close()
    return () if found is None else (found.lost, world.alive)


def dies_while_others_shrink(context, where: str) -> tuple[Any, ...]:
    """Rank 1 dies in a step, and rank 3 while the rest find together again."""
    world = context.world(timeout_s=LIMIT_S)
    job = CheckedLayer(world, "torch", "renormalize")
    if world.rank == 3:
        with mock.patch(where, side_effect=die):
            steps(job, 0, 8)
    found = steps(job, 0, 8, dies_at=4 if world.rank == 1 else -1)
    world.close()
    return () if found is None else (found.lost, world.alive)


def refusals(context, victim: int) -> list[str]:
    """What doesn't go, before and after."""
    world = context.world(timeout_s=LIMIT_S)
    job, plain = CheckedLayer(world, "none", "continue"), CheckedLayer(world, "torch")
    found = [said(world.shrink)]
    with world.step(1):
        found.append(said(world.shrink))
    batch = job.batch(2)
    open_call = job.layer.dispatcher.dispatch(batch.hidden, batch.topk)
    if world.rank == victim:
        die()
    steps(job, 10, 16)
    output = torch.zeros(open_call.tokens.num_rows, job.config.hidden_size)
    # On all ranks, which compare headers: they say the same.
    found.append(said(lambda: job.layer.dispatcher.combine(output, open_call.handle)))
    found.append(said(lambda: plain.layer(batch.hidden, batch.topk)))
    found.append(said(lambda: rebalance(world, [job.layer], [job.placement])))
    job.step(30)
    return found


def new_layers_graphs_and_counts(context, victim: int) -> list[Any]:
    """What a World that went on still does together."""
    world = context.world(timeout_s=LIMIT_S)
    job = CheckedLayer(world, "none", "continue", graphs=True)
    assert job.graphs is not None
    for step in range(4):
        job.step(step)
    if world.rank == victim:
        die()
    try:
        job.step(4)
        job.step(5)
    except RankLost:
        number = world.shrink().next_step
    stale = said(lambda: job.graphs(0))
    job.graphs.capture()
    for step in range(number, number + 4):
        job.step(step)
    other = CheckedLayer(world, "torch", "renormalize")
    for step in range(number + 4, number + 8):
        other.step(step)
    world.warmup(other.layer)
    config, scaled = other.layer.config, RuntimeConfig(payload="nvfp4", on_rank_lost="continue")
    scale = make_dispatcher("torch", world, config, scaled, input_scale=torch.ones(1) / 4).payload_scale
    unlike = RuntimeConfig(validate="full" if world.rank else "cheap")
    told = [said(partial(make_dispatcher, name, world, config, unlike)) for name in ("torch", "nothing")]
    return [stale, gather_values(world, world.rank), float(scale), told]


def apart_by_a_step(context, victim: int) -> tuple[Any, ...]:
    """Rank 0 has all that it needs of step 7, in which the victim dies; the others haven't."""
    world = context.world(timeout_s=LIMIT_S)
    with world.step(1, number=6):
        pass
    try:
        with world.step(1, number=7):
            if world.rank == victim:
                die()
            while world.rank != 0:
                world.raise_if_lost()
                time.sleep(0.01)
        with world.step(1, number=8):
            pass
    except RankLost:
        found = world.shrink()
        with world.step(1, number=found.next_step) as step:
            return found.completed, found.next_step, step.tokens
    return ()


def leave_on_purpose(context, dispatcher: str, leaving: list[int], port: int = 0) -> list[Any]:
    """The ranks of `leaving` leave in turn, between two steps, and then end."""
    if port:
        os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")
    world = World.from_env("cpu", timeout_s=LIMIT_S) if port else context.world(timeout_s=LIMIT_S)
    job, step = CheckedLayer(world, dispatcher, "continue"), 0
    found: list[Any] = []
    for rank in leaving:
        steps(job, step, step + 4)
        if world.rank == rank:
            return [said(lambda first=step: [job.step(n) for n in range(first + 4, first + 100)])]
        survivors = world.shrink([rank])
        found.append((survivors.lost, survivors.next_step - step))
        step = survivors.next_step
    steps(job, step, step + 4)
    return found


def refused_leavers(context) -> list[str]:
    world = context.world(attention_tp_size=2, timeout_s=LIMIT_S)
    wrong: list[Any] = [[context.size], [True], 2, [world.rank], [3 - world.rank], []]
    found = [said(lambda ranks=ranks: world.shrink(ranks)) for ranks in wrong]
    with world.step(1):
        found.append(said(lambda: world.shrink([2, 3])))
    return found


def generation_goes_on(context) -> list[Any]:
    """The last rank dies behind a `generate`; what the others say of the next one, and tokens with graphs and without
    after they went on."""
    from eprt.integrations.transformers import generate, parallelize
    from support.cases.tiny_families import tiny_model

    world, prompt = context.world(timeout_s=20.0), [[5, 17, 33, 8]]
    model, options = tiny_model("qwen3_moe"), {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    parallelize(model, world, RuntimeConfig(max_tokens_per_rank=16, on_rank_lost="continue"))
    before = generate(model, prompt, graphs=True, **options)
    if world.rank == world.size - 1:
        die()
    heard = said(lambda: [generate(model, prompt, graphs=True, **options) for _ in range(100)])
    world.shrink()
    return [heard, *(generate(model, prompt, graphs=graphs, **options) for graphs in (True, False)), before]


def told_lists(context, lists: list[list[int]], later: int = -1) -> tuple[str, tuple[bool, ...]]:
    """What a rank hears that calls shrink with its own list, and who is left in its World. All call at one moment, but
    for those from `later` on: the others have gone on by then."""
    world = context.world(timeout_s=LIMIT_S)
    CheckedLayer(world, "none", "continue").step(0)
    if 0 <= later <= world.rank:
        time.sleep(2.0)
    together = later < 0 and lists[world.rank]  # no guard says that its rank leaves before the rank's own call
    with mock.patch.object(Guard, "_leave_if_named") if together else nullcontext():
        if later < 0:
            world.barrier()
        found = said(lambda: world.shrink(lists[world.rank])), world.alive
        time.sleep(2.0)  # a process that ends is a lost one to the others
    return found


def loses_one_while_leavers_are_named(context) -> tuple[bool, ...]:
    """Rank 3 leaves, and rank 2 dies while rank 0 waits for rank 1 to say so, as on a GPU: there a guard ends a process
    that knows of no verdict."""
    world = context.world(timeout_s=8.0)
    assert world._guard is not None
    world._guard._exit_after_s = 1.0 if world.rank == 0 else None
    CheckedLayer(world, "none", "continue").step(0)
    time.sleep((0.0, 4.0, 0.5, 7.0)[world.rank])
    if world.rank == 2:
        die()
    if world.rank < 2:
        world.shrink([3])
        world._guard._exit_after_s = None
    return world.alive
