"""Jobs for test_step.py: what runs inside the ranks."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import torch

from eprt.errors import InputError
from eprt.world import World
from support.builders import NOTHING, caught, said
from support.jobs.layer_jobs import H, good_routing, kept, make_layer, tokens_of


def one_step(world, tokens=1, **arguments):
    """What this rank is told by a step with nothing inside."""

    def step():
        with world.step(tokens, **arguments):
            pass

    return said(step)


def seen(context, counts, words):
    """What each rank is told: (number, tokens, words, R), by the World's own count and by the caller's."""
    world, found = context.world(), []
    for number in (None, 70):
        with world.step(counts[context.rank], number=number, words=words[context.rank]) as step:
            assert world.current_step is step
            found.append((step.number - (0 if number else world.step_number), step.tokens, step.words))
            found.append(step.tokens_per_rank)
        assert world.current_step is None
    return found


def same_as_outside(context, counts, attention_tp):
    """(largest difference to the same calls outside of a step, exchanges that asked for R inside) of two layers."""
    first, second = (kept(context, name, attention_tp=attention_tp, shared=True) for name in ("first", "second"))
    world = first.world
    inputs = [tokens_of(world.dp_rank, counts[world.dp_rank] // part) for part in (1, 2)]
    expected = [second(first(x)) for x in inputs]
    with world.step(counts[world.dp_rank]) as step:
        assert step.tokens == tuple(counts[r // attention_tp] for r in range(world.size))
        found = [second(first(x)) for x in inputs]  # two forwards, the second of them smaller: a draft model's
    apart = [float((a - b).abs().max()) if a.numel() else 0.0 for a, b in zip(found, expected, strict=True)]
    return max(apart)


def no_exchange_inside(context):
    """As on GPUs with cheap validation: (exchanges at the start of a step, inside it, outside without R)."""
    moe = kept(context, "quiet", dispatcher="none")  # torch exchanges how many rows go where
    world, counted = moe.world, []
    gather = world.gather_words
    world.gather_words = lambda words: counted.append(len(words)) or gather(words)
    world.compares_headers = lambda full: False
    try:
        numbers = []
        with world.step(3 + context.rank):
            numbers.append(len(counted))
            for _ in range(3):
                moe(tokens_of(context.rank, 3 + context.rank))
            numbers.append(len(counted) - numbers[0])
        start = len(counted)
        moe(tokens_of(context.rank, 3 + context.rank))
        numbers.append(len(counted) - start)
        return numbers
    finally:
        del world.gather_words, world.compares_headers


def disagree(context, wrong):
    """Rank 1 says something else of a step. (what this rank is told, whether the next step works)"""
    moe = kept(context)
    world, rank = moe.world, context.rank
    x = tokens_of(rank, 4)

    def step(**arguments):
        with world.step(**{"num_tokens": 4, "number": 10, **arguments}):
            moe(x)

    told = said(lambda: step(**(wrong if rank == 1 else {})))
    step(number=11)
    return told, True


def groups_that_differ(context):
    """Rank 1 says other tokens than rank 0, with which it shares them."""
    return one_step(kept(context, "groups", attention_tp=2).world, 5 if context.rank == 1 else 4)


def a_barrier_instead(context):
    world = context.world()
    return said(world.barrier) if context.rank == 1 else one_step(world)


def other_layers(context, how):
    """GPUs compare nothing inside: the next step does. (what this rank is told, whether the step after works)"""
    first, second = kept(context, "first"), kept(context, "second")
    world = first.world
    calls = [[(first, second), (second, first)], [(first, second), (first,)], [(first, second), ()]][how][context.rank]
    assert one_step(world) == NOTHING  # ends what jobs before this one called outside of steps
    for layer in () if how == 2 and context.rank == 1 else calls:
        world._call_log.calls.append((layer.dispatcher.layer, layer.dispatcher.fingerprint))
    return one_step(world), one_step(world)


def a_call_broken_off(context, ranks):
    """`ranks` drop a call after dispatch; the others haven't combined it yet. (what this rank is told, and then)"""
    moe = kept(context)
    world, dispatcher = moe.world, moe.dispatcher
    with world.step(1):
        sent = dispatcher.dispatch(tokens_of(context.rank, 1), good_routing(1))
        if context.rank in ranks:
            sent.handle.close()
    told = one_step(world)
    sent.handle.close()
    return told, one_step(world)


def an_error_inside(context, kind):
    """Rank 1 raises inside a step. (what this rank is told, whether the next step works)"""
    moe = kept(context)
    x, world = tokens_of(context.rank, 4), moe.world

    def step():
        with world.step(4):
            if kind == "on every rank":
                raise InputError("the caller's own")
            moe(x[:, 1:] if context.rank == 1 else x, good_routing(4))

    told = said(step)
    with world.step(4):
        fine = moe(x).isfinite().all().item()
    return told, fine


def swallowed(context):
    """Rank 1 raises its own error between two layers, catches it, and goes on to the next step."""
    moe = kept(context)
    x, world = tokens_of(context.rank, 4), moe.world

    def step():
        with world.step(4):
            moe(x)
            if context.rank == 1:
                raise KeyError("of the caller")
            moe(x)

    def go_on():
        try:
            step()
        except KeyError:
            step()

    told = said(go_on)
    with world.step(4):
        return told, moe(x).isfinite().all().item()


def nested(context):
    world = context.world()

    def two():
        with world.step(1), world.step(1):
            pass

    told = said(two)
    with world.step(2) as step:
        return told, step.tokens


def from_a_thread(context):
    """A layer called from a thread of the step takes its R."""
    moe = kept(context)
    x, found = tokens_of(context.rank, 3), []
    with moe.world.step(3 + context.rank) as step:
        thread = threading.Thread(target=lambda: found.append(moe(x)))
        thread.start()
        thread.join()
    return torch.equal(found[0], moe(x, tokens_per_rank=step.tokens_per_rank))


def alone():
    """A world of one. (tokens, R, the refusal of more tokens than it said)"""
    with World.from_env("cpu") as world:
        moe = make_layer(SimpleNamespace(world=lambda **_: world))
        with world.step(0) as empty:
            assert moe(torch.zeros(0, H)).shape == (0, H)
        with world.step(2) as step:
            moe(tokens_of(0, 2))
            return empty.tokens_per_rank, step.tokens, caught(lambda: moe(tokens_of(0, 3)))[1]
