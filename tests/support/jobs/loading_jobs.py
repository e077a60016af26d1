"""Jobs for test_load_experts.py: layers whose experts change their values between steps, inside the ranks."""

from __future__ import annotations

import time
from dataclasses import replace
from unittest.mock import patch

import torch

from eprt.config import RuntimeConfig
from eprt.conformance.checks import NanOutput
from eprt.experts import EXECUTORS, Executor
from eprt.experts.base import PreparedExecutor
from eprt.layer import ExpertParallelMoE
from eprt.placement import ExpertPlacement
from eprt.weights import Dense, ExpertWeights
from support.builders import die, said
from support.jobs.balance_jobs import CONFIG, E, H, build, full_weights, right, share

SLOTS = {1: (*range(E), 3, 0), 2: (*range(E), 3, 0)}  # two replicas


def whole(layer, world, number):
    """This rank's experts of weight set `number`."""
    return share(full_weights(number), layer.placement, world.rank)


def single(number, experts):
    """Some experts of weight set `number`, one row each."""
    up, down, up_bias, down_bias = (tensor[list(experts)] for tensor in full_weights(number))
    return ExpertWeights(Dense(up), Dense(down), up_bias, down_bias)


def answers(layer, world, number):
    """Whether two steps give what weight set `number` gives in one process."""
    found = []
    for step in (1, 2):
        with world.step(world.rank + 7, number=step + 10 * layer.dispatcher._calls):
            found.append(right(layer, world, step, number))
    return all(found)


def updated(context, dispatcher, executor):
    """Whether outputs are right after each of some loads, and whether the tensors stayed where they are."""
    world = context.world()
    layer = build(world, SLOTS[world.size], dispatcher=dispatcher, executor=executor)
    at = [tensor.data_ptr() for tensor in layer.executor.slot_tensors().values()]
    found = [answers(layer, world, 0)]
    for number in (5, 6):
        layer.load_experts(whole(layer, world, number))
        found.append(answers(layer, world, number))
    # Each rank brings others, in an order of its own; expert 3 has two replicas; and one rank brings none.
    layer.load_experts(single(7, [3, 6, 0]), [3, 6, 0])
    rest = [e for e in reversed(range(E)) if e not in (3, 6, 0)]
    layer.load_experts(single(7, rest[:2]), rest[:2])
    layer.load_experts(single(7, rest[2:]), rest[2:])
    found.append(answers(layer, world, 7))
    if world.rank:
        layer.load_experts(None, [])
    else:
        layer.load_experts(single(7, [1]), [1])
    found.append(answers(layer, world, 7))
    stayed = at == [tensor.data_ptr() for tensor in layer.executor.slot_tensors().values()]
    layer.close()
    return found, stayed


def half_loaded(context):
    """What is raised by a load during which rank 1 runs out of memory, by what follows, and whether a load of all heals
    it."""
    world = context.world()
    layer = build(world, SLOTS[world.size])
    write = PreparedExecutor.load_experts

    def out_of_memory(self, weights, slots=None):
        write(self, weights.map(lambda tensor: tensor[:1]), [0])
        raise torch.OutOfMemoryError("CUDA out of memory")

    with patch.object(PreparedExecutor, "load_experts", out_of_memory if world.rank == 1 else write):
        told = said(lambda: layer.load_experts(whole(layer, world, 5)))

    def call():
        return said(lambda: right(layer, world, 1, 5)).partition(" before the next call")[0]

    refused = [call()]
    with world.step(3):
        refused.append(call())
    layer.load_experts(single(5, [1, 2]), torch.tensor([1, 2]))
    refused.append(call())
    layer.load_experts(single(5, range(E)), range(E))  # all of them, by their numbers
    works = [answers(layer, world, 5)]
    layer.load_experts(whole(layer, world, 0))
    works.append(answers(layer, world, 0))
    layer.close()
    return told, refused, works


class Another(NanOutput):
    """Takes the place of a layer's executor, as a model's own code does, and takes no weights."""

    spec = replace(EXECUTORS["reference"], name="another")


def refused(context, wrong):
    """What every rank hears when rank 1's load can't be, and whether the layer goes on as it was."""
    world = context.world()
    layer = build(world, SLOTS[world.size])
    mine = whole(layer, world, 5), None
    given = {
        "none": (None, None),
        "twice": (single(5, [1, 1]), [1, 1]),
        "unknown": (single(5, [1]), [E]),
        "without": (None, [1]),
        "kind": ({"gate_up": 1}, [1]),
        "number": (single(5, [1]), 1),
        "mask": (single(5, [1]), [True]),
        "size": (single(5, [1]), None),
        "order": (replace(single(5, [1]), hidden_order=torch.arange(H)), [1]),
        "list": (replace(mine[0], hidden_order=list(range(H))), None),
        "empty": (replace(mine[0], gate_up=Dense(None)), None),
        "bias": (replace(mine[0], down_bias=mine[0].down_bias.tolist()), None),
        "replica": (single(5, [3]), [3]),
        "together": (single(5, [5]), [5]),
    }
    if wrong == "together":
        layer.executor.slot_tensors = lambda: Executor.slot_tensors(layer.executor)
    if wrong == "other executor":
        layer.executor = Another(layer.executor)
    if wrong == "step":
        with world.step(1):
            told = said(lambda: layer.load_experts(*mine))
    else:
        told = said(lambda: layer.load_experts(*(given.get(wrong, mine) if world.rank == 1 else mine)))
    works = answers(layer, world, 0)
    layer.close()
    return told, works


def sorted_columns(weights, order):
    return replace(weights, gate_up=Dense(weights.gate_up.data[:, :, order]), hidden_order=order)


def in_another_order(context):
    """Whether outputs are right where columns of `gate_up` are in another order, of experts that were built, loaded
    whole and one by one; what every rank hears of rank 1's other order; and of one in a layer that is built."""
    world, order = context.world(), torch.arange(H).flip(0).roll(3)
    runtime = RuntimeConfig(dispatcher="torch", executor="reference", max_tokens_per_rank=16)
    placement = ExpertPlacement(E, world.parallel, SLOTS[world.size])

    def made(order):
        weights = sorted_columns(share(full_weights(0), placement, world.rank), order)
        return ExpertParallelMoE(CONFIG, world, weights, runtime=runtime, placement=placement)

    layer = made(order)
    found = [right(layer, world, 0)]
    layer.load_experts(sorted_columns(whole(layer, world, 5), order))
    found.append(right(layer, world, 1, 5))
    layer.load_experts(sorted_columns(single(6, range(E)), order), list(range(E)))
    found.append(right(layer, world, 2, 6))
    other = order if world.rank != 1 else order.flip(0)
    told = said(lambda: layer.load_experts(sorted_columns(whole(layer, world, 5), other)))
    layer.close()
    return found, told, said(lambda: made(other))


def killed_half_way(context, folder):
    """Rank 1 dies while it writes new experts. Each of the others writes what it raised, after how many seconds, what
    the next call raises, and what its layer says."""
    world = context.world(timeout_s=5.0)
    layer = build(world, (*range(E), 0))
    write = PreparedExecutor.load_experts

    def dies(self, weights, slots=None):
        write(self, weights.map(lambda tensor: tensor[:1]), [0])
        die()

    started = time.monotonic()
    with patch.object(PreparedExecutor, "load_experts", dies if world.rank == 1 else write):
        told = said(lambda: layer.load_experts(whole(layer, world, 5)))
    seconds = time.monotonic() - started
    after = said(lambda: right(layer, world, 1, 5))
    (folder / str(world.rank)).write_text(
        f"{told.partition(':')[0]} {seconds:.2f} {after.partition(':')[0]} {layer.broken}"
    )
