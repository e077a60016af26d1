"""Jobs of the conformance tests: what runs inside the ranks. No pytest here, so that ranks start fast."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch

from eprt.config import MoEConfig, RuntimeConfig
from eprt.conformance import checks, transport
from eprt.conformance.cases import BY_NAME, CONFIGS, Batch, coded_hidden, make_batches
from eprt.conformance.oracle import expected_outputs, full_weights, layer_of, relative_error
from eprt.dispatch import make_dispatcher
from eprt.tokens import TopK
from eprt.weights import Dense
from support.builders import caught

PAIRS = [("none", "flat"), ("torch", "flat"), ("torch", "expert_major")]
F32 = CONFIGS["silu_f32"]


def dispatcher_of(context, pair, config=F32, layer=0, **runtime):
    """One per configuration, kept from job to job."""
    key = ("dispatcher", pair, config, layer, tuple(sorted(runtime.items())))
    settings = RuntimeConfig(**{"max_tokens_per_rank": 64, **runtime})
    return context.once(key, lambda: make_dispatcher(pair[0], context.world(), config, settings, pair[1], layer))


# ---- property: any routing ------------------------------------------------------------------------------------


def round_trips(context, ids_by_rank, eighths_by_rank, agreed):
    """dispatch + identity + combine on every pair; for each: None, or what was wrong on this rank.

    Weights are whole eighths and tokens whole numbers below 16, so float32 sums are exact in any order.
    """
    K = len(ids_by_rank[0][0]) if ids_by_rank[0] else 1
    config = MoEConfig(num_experts=8, top_k=K, hidden_size=24, intermediate_size=8, weight_format="f32")
    batches = [
        Batch(
            coded_hidden(len(ids), rank, 0, 24),
            TopK(
                torch.tensor(ids, dtype=torch.int32).view(-1, K),
                torch.tensor(eighths, dtype=torch.float32).view(-1, K) / 8,
            ),
        )
        for rank, (ids, eighths) in enumerate(zip(ids_by_rank, eighths_by_rank, strict=True))
    ]
    own = batches[context.rank]
    ones = torch.ones(8)
    found = []
    for pair in PAIRS:
        dispatcher = dispatcher_of(context, pair, config)
        sent = dispatcher.dispatch(own.hidden, own.topk, agreed)
        problems = transport.wrong_arrivals(sent.tokens, batches, dispatcher.shard, None)
        out = transport.scale_experts(sent.tokens, dispatcher.shard, ones, torch.float32)
        returned = dispatcher.combine(out, sent.handle)
        expected = transport.weighted_sums(own, ones, None).float()
        if not torch.equal(returned, expected):
            problems.append(f"combine is off by {float((returned - expected).abs().max())}")
        found.append((pair, problems))
    return found


# ---- two calls at once ---------------------------------------------------------------------------------------


def most_open_calls(context, check):
    """Runs a transport check; how many of its calls were open at the same time at the most."""
    dispatcher, changes = checks._dispatcher(context, check, context.world()), []

    def counted(call, change):
        return lambda *args: (changes.append(change), call(*args))[1]

    dispatcher.dispatch, dispatcher.combine = counted(dispatcher.dispatch, 1), counted(dispatcher.combine, -1)
    try:
        [row] = checks.run_checks(context, [check])
    finally:
        del dispatcher.dispatch, dispatcher.combine
    return max(accumulate(changes)) if row.ok else row.detail


# ---- mutations: each must fail the oracle ---------------------------------------------------------------------


def mutated_layer(context, mutation, pair, executor):
    """Relative error of one layer call against the oracle, with one thing wrong."""
    world, config = context.world(), F32
    full = full_weights(config)
    batch = make_batches(BY_NAME["uneven-uniform"], 0, world.size, config, torch.float32)[world.rank]
    topk, given = batch.topk, full
    if mutation == "swap_gate_and_up":
        given = replace(full, gate_up=Dense(full.gate_up.data.roll(config.intermediate_size, 1)))
    elif mutation == "shift_experts":
        topk = TopK((topk.ids + 1) % config.num_experts, topk.weights)
    runtime = RuntimeConfig(dispatcher=pair[0], token_format=pair[1], executor=executor, max_tokens_per_rank=64)
    layer = layer_of(world, config, given, runtime)
    if mutation == "drop_a_rank" and world.rank == 1:
        whole = layer.executor
        layer.executor = lambda tokens, out=None: torch.zeros_like(whole(tokens))
    error = relative_error(layer(batch.hidden, topk), expected_outputs(config, full, [batch])[0])
    layer.close()
    return error


# ---- bad calls ------------------------------------------------------------------------------------------------


def bad_call(context, kind, pair, through_layer=False):
    """A bad call on one rank or on all, then a correct one. Returns (error type, its text, the correct call's error).

    The correct call is on the same dispatcher or layer, so it also proves that the failed one left nothing behind.
    """
    target = _layer_of(context, pair) if through_layer else dispatcher_of(context, pair)
    told = caught(lambda: (INPUT | CALLS)[kind][0](context, target, through_layer))
    return *told, good_call(context, target, through_layer)


def good_call(context, target, through_layer=False):
    """Relative error of a correct call."""
    batch = _batch(context, 6 + context.rank)
    if through_layer:
        expected = expected_outputs(F32, _full(context), [batch])[0]
        return relative_error(target(batch.hidden, batch.topk), expected)
    ones = torch.ones(F32.num_experts)
    sent = target.dispatch(batch.hidden, batch.topk)
    out = transport.scale_experts(sent.tokens, target.shard, ones, torch.float32)
    return relative_error(target.combine(out, sent.handle), transport.weighted_sums(batch, ones, None))


def _batch(context, num_tokens):
    generator = torch.Generator().manual_seed(context.rank)
    ids = torch.rand(num_tokens, F32.num_experts, generator=generator).argsort(1)[:, : F32.top_k].to(torch.int32)
    return Batch(coded_hidden(num_tokens, context.rank, 0, F32.hidden_size), TopK(ids, torch.full(ids.shape, 0.25)))


def _full(context):
    return context.once("full", lambda: full_weights(F32))


def _layer_of(context, pair):
    runtime = RuntimeConfig(
        dispatcher=pair[0], token_format=pair[1], executor="reference", max_tokens_per_rank=64, strict_capacity=True
    )
    return context.once(("layer", pair), lambda: layer_of(context.world(), F32, _full(context), runtime))


def _call(target, through_layer, batch, agreed=None):
    if through_layer:
        return target(batch.hidden, batch.topk, tokens_per_rank=agreed)
    return target.dispatch(batch.hidden, batch.topk, agreed)


def _on_rank_1(change):
    """A call whose input is changed on rank 1 only."""

    def call(context, target, through_layer):
        batch = _batch(context, 5)
        _call(target, through_layer, change(batch) if context.rank == 1 else batch)

    return call


def _hidden(change):
    return _on_rank_1(lambda batch: replace(batch, hidden=change(batch.hidden)))


def _ids(change):
    return _on_rank_1(lambda batch: replace(batch, topk=replace(batch.topk, ids=change(batch.topk.ids))))


def _weights(change):
    return _on_rank_1(lambda batch: replace(batch, topk=replace(batch.topk, weights=change(batch.topk.weights))))


def _set(value):
    def change(tensor):
        changed = tensor.clone()
        changed[2, 1] = value
        return changed

    return change


def _agreeing_on(rows):
    """A call with R given: `rows(rank)`."""
    return lambda context, target, through_layer: _call(target, through_layer, _batch(context, 5), rows(context.rank))


def _over_capacity(context, target, through_layer):
    _call(target, through_layer, _batch(context, 65 if context.rank == 1 else 2))


def _other_order(context, target, through_layer):
    """Rank 1 calls two layers in the other order."""
    second = dispatcher_of(context, (target.spec.name, target.token_format), layer=7)
    order = (second, target) if context.rank == 1 else (target, second)
    for dispatcher in order:
        _call(dispatcher, False, _batch(context, 4))


def _other_config(context, target, through_layer):
    """Rank 1 holds another layer's maths: same sizes, other routing scale."""
    config = F32 if context.rank != 1 else replace(F32, routing=replace(F32.routing, scaling_factor=2.5))
    _call(dispatcher_of(context, (target.spec.name, target.token_format), config, layer=8), False, _batch(context, 4))


def _with_another(name, values):
    """The World's numbers of that `name` differ in the next call: `values` are rank 1's and its peers'.

    None is what it was before: a number that changes tells a dispatcher to begin anew.
    """

    def job(context, target, through_layer):
        world = context.world()
        setattr(world, name, values[context.rank != 1])
        try:
            _call(target, through_layer, _batch(context, 4))
        finally:
            setattr(world, name, 0)

    return job


def _other_combine_order(context, target, through_layer):
    """Rank 1 combines two open calls in the other order; nothing but the calls' numbers differs."""
    open_calls = [_call(target, False, _batch(context, 4), 4) for _ in range(2)]
    first, _ = reversed(open_calls) if context.rank == 1 else open_calls
    out = transport.scale_experts(first.tokens, target.shard, torch.ones(F32.num_experts), torch.float32)
    try:
        target.combine(out, first.handle)
    finally:
        for sent in open_calls:
            sent.handle.close()


def _non_finite_weight(context, target, through_layer):
    full = dispatcher_of(context, (target.spec.name, target.token_format), validate="full")
    batch = _batch(context, 5)
    if context.rank == 1:
        batch.topk.weights[3, 0] = torch.nan
    full.dispatch(batch.hidden, batch.topk)


def _experts_that_do_not_divide(context, target, through_layer):
    make_dispatcher(target.spec.name, context.world(), replace(F32, num_experts=9), RuntimeConfig())


def _to_meta(batch):
    return Batch(batch.hidden.to("meta"), TopK(batch.topk.ids.to("meta"), batch.topk.weights.to("meta")))


# Each call, the error's type that every rank must be told, and a word of its text. Wrong on rank 1 only unless the name
# says otherwise.
INPUT = {
    "hidden_of_whole_numbers": (_hidden(lambda x: x.int()), "InputError", "torch.int32"),
    "hidden_in_float64": (_hidden(lambda x: x.double()), "InputError", "float64"),
    "hidden_too_narrow": (_hidden(lambda x: x[:, :-1]), "InputError", "expected [T, 72]"),
    "hidden_for_fewer_tokens": (_hidden(lambda x: x[:-1]), "InputError", "must agree"),
    "hidden_of_one_dimension": (_hidden(lambda x: x[0]), "InputError", "expected [T, 72]"),
    "hidden_jagged": (_hidden(lambda x: torch.nested.nested_tensor([*x], layout=torch.jagged)), "InputError", "nested"),
    "everything_on_another_device": (_on_rank_1(_to_meta), "InputError", "meta"),
    "ids_in_int64": (_ids(lambda ids: ids.long()), "InputError", "expected int32"),
    "ids_of_another_top_k": (_ids(lambda ids: ids[:, :-1]), "InputError", "expected [T, 3]"),
    "ids_of_one_dimension": (_ids(lambda ids: ids[:, 0]), "InputError", "expected [T, 3]"),
    "ids_on_another_device": (_ids(lambda ids: ids.to("meta")), "InputError", "meta"),
    "id_below_zero": (_ids(_set(-1)), "InputError", "spans [-1, "),
    "id_above_the_invalid_one": (_ids(_set(F32.num_experts + 1)), "InputError", ", 9]"),
    "weights_in_bf16": (_weights(lambda weights: weights.bfloat16()), "InputError", "expected float32"),
    "weights_on_another_device": (
        _weights(lambda weights: weights.to("meta")),
        "InputError",
        "topk_weights is on meta",
    ),
    "weights_of_another_shape": (
        _weights(lambda weights: weights[:, :-1]),
        "InputError",
        "expected the shape of topk_ids",
    ),
    "tokens_over_capacity": (_over_capacity, "CapacityError", "max_tokens_per_rank >= 65"),
    "agreed_over_capacity": (_agreeing_on(lambda rank: 65), "CapacityError", "max_tokens_per_rank >= 65"),
    "tokens_over_agreed": (_agreeing_on(lambda rank: 3), "CapacityError", "tokens_per_rank >= 5"),
    "agreed_zero": (_agreeing_on(lambda rank: 0), "InputError", "at least 1"),
    "different_agreed": (_agreeing_on(lambda rank: 8 if rank == 1 else 16), "WorldMismatch", "tokens_per_rank"),
    "agreed_on_one_rank_only": (
        _agreeing_on(lambda rank: 16 if rank == 1 else None),
        "WorldMismatch",
        "tokens_per_rank",
    ),
    "different_dtype": (_hidden(lambda x: x.bfloat16()), "WorldMismatch", "dtype"),
    "skipped_step": (_with_another("step_number", (5, 6)), "WorldMismatch", "step"),
    "different_generation": (_with_another("generation", (2, 1)), "WorldMismatch", "this call (generation);"),
}
CALLS = {  # of a dispatcher alone
    "non_finite_weight": (_non_finite_weight, "InputError", "1 non-finite"),
    "different_layer_order": (_other_order, "WorldMismatch", "layer"),
    "different_combine_order": (_other_combine_order, "WorldMismatch", "this call (call);"),
    "different_config": (_other_config, "WorldMismatch", "routing.scaling_factor"),
    "experts_that_do_not_divide": (_experts_that_do_not_divide, "ConfigError", "9 experts"),
}
