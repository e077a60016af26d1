"""Jobs for test_placement.py: layers whose experts change places between steps, inside the ranks."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import torch

from eprt.balance import gather_load, rebalance
from eprt.config import Activation, MoEConfig, RuntimeConfig
from eprt.errors import EprtError
from eprt.layer import ExpertParallelMoE
from eprt.placement import ExpertPlacement
from eprt.tokens import TopK
from eprt.weights import Dense, ExpertWeights
from support.builders import die, distinct_experts, said, whole_numbers

E, K, H, I = 8, 3, 16, 8
# Whole numbers through ReLU^2: every sum is exact in float32 whatever its order, so placements must agree bit for bit.
CONFIG = MoEConfig(E, K, H, I, activation=Activation("relu2"), bias=True, weight_format="f32")


@cache
def full_weights(layer):
    """gate_up, down and biases of all experts; each layer has its own."""
    shapes = (E, I, H), (E, H, I), (E, I), (E, H)
    return [whole_numbers(*shape, seed=100 * layer + place) for place, shape in enumerate(shapes)]


def share(weights, placement, rank):
    """A rank's canonical experts, as one that reads a checkpoint would give them."""
    shard = placement.shard(rank)
    width, held = shard.slice_intermediate(I), list(shard.experts)
    up, down, up_bias, down_bias = (tensor[held] for tensor in weights)
    return ExpertWeights(Dense(up[:, width]), Dense(down[:, :, width]), up_bias[:, width].contiguous(), down_bias)


def build(world, slots, *, held=None, layer=0, executor="reference", dispatcher="torch", phase="prefill", **options):
    """`held`: the slots whose experts' weights it gets, where they aren't those it is told of."""
    placement = ExpertPlacement(E, world.parallel, tuple(slots))
    runtime = RuntimeConfig(
        dispatcher=dispatcher, executor=executor, max_tokens_per_rank=16, phase=phase, **options.pop("runtime", {})
    )
    given = placement if held is None else ExpertPlacement(E, world.parallel, held)
    weights = share(full_weights(layer), given, world.rank)
    return ExpertParallelMoE(CONFIG, world, weights, runtime=runtime, layer=layer, placement=placement, **options)


def batch(rank, step):
    """Tokens of this rank and step; now and then none. (x, ids, weights)"""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    T = int(torch.randint(0, 7, (), generator=draw)) if (step + rank) % 3 else 0
    x = torch.randint(-3, 4, (T, H), generator=draw).float()
    ids = distinct_experts(T, E, K, draw)
    if T:
        ids[0, 0] = E  # no expert
    return x, ids, torch.randint(-3, 4, (T, K), generator=draw).float()


def expected(x, ids, weights, layer=0):
    """Every expert on every token, by hand."""
    up, down, up_bias, down_bias = full_weights(layer)
    hidden = (torch.einsum("th,eih->tei", x, up) + up_bias).relu().square()
    each = torch.einsum("tei,ehi->teh", hidden, down) + down_bias
    each = torch.cat([each, each.new_zeros(len(x), 1, H)], dim=1)
    chosen = each.gather(1, ids.long()[:, :, None].expand(-1, -1, H))
    return (chosen * weights[:, :, None]).sum(1)


def right(layer, world, step, number=0):
    x, ids, weights = batch(world.rank, step)
    return torch.equal(layer(x, TopK(ids, weights)), expected(x, ids, weights, number))


def placed(context, slots, **options):
    """Whether this rank's outputs under the placement are those of one process with all experts."""
    world = context.world()
    layer = build(world, slots, **options)
    found = [right(layer, world, step) for step in range(4)]
    layer.close()
    return all(found)


def elsewhere_by_default(context, slots, shared_words):
    """Whether rows are right where torch makes tensors on another device unless it is told: of a layer that was built,
    moved and loaded so. Without `shared_words` ranks agree as those of several hosts do."""
    world, weights = context.world(), [full_weights(layer) for layer in range(2)]
    placements = [ExpertPlacement(E, world.parallel, tuple(order)) for order in (slots, reversed(slots))]
    first, second = (share(w, p, world.rank) for w, p in zip(weights, placements, strict=True))
    words, world._shared = world._shared, world._shared if shared_words else None
    try:
        with torch.device("meta"):
            layer = ExpertParallelMoE(
                CONFIG, world, first, runtime=RuntimeConfig(max_tokens_per_rank=16), placement=placements[0]
            )
            rebalance(world, [layer], placements[1:])
            layer.load_experts(second)
        x, ids, factors = batch(world.rank, 1)
        with torch.device("meta"):
            output = layer(x, TopK(ids, factors))
    finally:
        world._shared = words
    return torch.equal(output, expected(x, ids, factors, 1))


def different_placements(context):
    """What every rank hears when rank 1 was given another placement."""
    return said(lambda: build(context.world(), range(E) if context.rank != 1 else reversed(range(E))))


def running_loop(context, placements, *, steps, every, executor, moe_tp_size=1, num_layers=2):
    """(steps with a wrong row, number of rebalances, longest pause, slots moved) of a loop."""
    world = context.world(moe_tp_size=moe_tp_size)
    layers = [build(world, placements[0], layer=n, executor=executor) for n in range(num_layers)]
    addresses = [t.data_ptr() for layer in layers for t in layer.executor.slot_tensors().values()]
    wrong, moves = 0, []
    for step in range(steps):
        with world.step(batch(world.rank, step)[0].shape[0], number=step):
            wrong += not all(right(layer, world, step, n) for n, layer in enumerate(layers))
        if step % every == every - 1:
            slots = placements[len(moves) % len(placements)]
            turned = [tuple(slots), tuple(reversed(slots))]  # the layers differ
            moves.append(rebalance(world, layers, [ExpertPlacement(E, world.parallel, s) for s in turned[:num_layers]]))
    stayed = addresses == [t.data_ptr() for layer in layers for t in layer.executor.slot_tensors().values()]
    for layer in layers:
        layer.close()
    return wrong, len(moves), max(m.pause_s for m in moves), sum(m.slots for m in moves), stayed


def one_move(context, before, after, *, executor="reference", dispatcher="torch", phase="prefill", wrong_slot=False):
    """Whether this rank's rows are right before and after; `wrong_slot` moves the weights elsewhere than the ids."""
    world = context.world()
    layer = build(world, before, executor=executor, dispatcher=dispatcher, phase=phase)
    found = [right(layer, world, 1)]
    new = ExpertPlacement(E, world.parallel, tuple(after))
    moved = rebalance(world, [layer], [new])
    if wrong_slot:
        layer.adopt_placement(ExpertPlacement(E, world.parallel, (*after[1:], after[0])))
    found += [right(layer, world, step) for step in (1, 2)]
    layer.close()
    return found, moved.slots


def refusals(context, what):
    """What this rank hears when a rebalance can't be, and whether the layer still works as before."""
    world = context.world()
    plain, spare = tuple(range(E)), (*range(E), 0, 1)
    single = {"slots": (*plain, -1, -1), "executor": "torch_grouped", "runtime": {"batch_invariant": True}}
    layer = build(world, **single if what == "single" else {"slots": plain if what == "plain" else spare})
    before = layer.placement
    new = ExpertPlacement(E, world.parallel, (*reversed(range(E)), *(() if what == "plain" else (1, 0))))
    layers, placements, options = [layer], [new], {}
    if what == "others":
        placements = [new if world.rank else ExpertPlacement(E, world.parallel, (0, 1, *range(E)))]
    elif what == "sizes":
        placements = [ExpertPlacement(E, world.parallel, (*range(E), *range(4)))]
    elif what == "count":
        placements = []
    elif what in (odd := {"kind": (layers, [None]), "alone": (layer, placements)}) and world.rank == 1:
        layers, placements = odd[what]
    elif what in (limits := {"bytes": 100, "text": "1 GB", "negative": -10}):
        options = {"most_bytes": limits[what]}
    elif what == "layout" and world.rank == 1:
        tensors = layer.executor.slot_tensors()
        layer.executor.slot_tensors = lambda: {name: tensor.double() for name, tensor in tensors.items()}
    elif what == "executor":
        layer.executor.slot_tensors = lambda: type(layer.executor).__mro__[1].slot_tensors(layer.executor)
    elif what == "transport":
        world.all_to_all, kept = fail, world.all_to_all

    def attempt():
        with world.step(0) if what == "step" else nullcontext():
            rebalance(world, layers, placements, **options)

    told = said(attempt, (EprtError, ArithmeticError))
    if what == "transport":
        world.all_to_all = kept
    if what == "layout":
        layer.executor.__dict__.pop("slot_tensors", None)
    still = right(layer, world, 1) and layer.placement is before
    layer.close()
    return told, still


def fail(*_):
    raise ArithmeticError("the transport broke")


def killed_half_way(context, folder):
    """Rank 1 dies while weights travel; each of the others writes what it raised, and whether it holds what it held."""
    world = context.world(timeout_s=5.0)
    layer = build(world, (*range(E), 0))
    before, held = layer.placement, {n: t.clone() for n, t in layer.executor.slot_tensors().items()}
    if world.rank == 1:
        world.all_to_all = die
    try:
        rebalance(world, [layer], [ExpertPlacement(E, world.parallel, (0, *reversed(range(E))))])
    except EprtError as error:
        same = all(torch.equal(t, held[n]) for n, t in layer.executor.slot_tensors().items())
        (folder / str(world.rank)).write_text(f"{type(error).__name__} {same and layer.placement is before}")


def counted(context, slots, *, steps):
    """(this rank's counts, what they should be, counts after a reset, sums over ranks) of a layer that counts, and what
    is heard where rank 1 asks for another layer's."""
    world = context.world()
    layer = build(world, slots, runtime={"count_load": True})
    layer.warmup()
    wanted = torch.zeros(E + 1, dtype=torch.int64)
    for step in range(steps):
        x, ids, weights = batch(world.rank, step)
        layer(x, TopK(ids, weights))
        for expert in ids.flatten().tolist():
            wanted[expert] += 1
    found, total = layer.load(), gather_load(world, [layer, layer])
    layer.reset_load()
    after, other = layer.load(), build(world, slots, layer=1, runtime={"count_load": True})
    told = said(lambda: gather_load(world, [other if world.rank else layer]))
    layer.close()
    other.close()
    return found.tolist(), wanted[:E].tolist(), int(after.sum()), total.tolist(), told


def not_counted(context):
    """What a layer says that doesn't count, asked by one rank, and by all for the sum."""
    world = context.world()
    layer = build(world, range(E))
    gathers = (lambda given=given: gather_load(world, given) for given in ([layer], layer, []))
    asked = layer.load, layer.reset_load, *gathers
    told = [said(ask) for ask in asked]
    layer.close()
    return told
