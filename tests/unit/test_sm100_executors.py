"""The Blackwell executors whole, on kernels that check their arguments and read the prepared tensors by documented
addresses (`sm100_kernels`), against the float32 witness."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.cases.expert_cases import (
    CPU,
    NAN,
    RELU2,
    RUNTIME,
    SILU,
    make_config,
    make_expert_major,
    make_flat,
    make_weights,
    rows_with_expert,
    shard_of,
    valid_rows,
)
from support.cases.sm100_cases import ACTIVATIONS, as_quantised, as_slabs, build, calibrated, case, packed, witness
from support.stand_ins.sm100_kernels import FakeCuteDsl, FakeTrtllm

from eprt.config import Routing
from eprt.conformance.oracle import relative_error, shard_weights
from eprt.errors import ConfigError, InputError, UsageError
from eprt.experts import EXECUTORS, rules
from eprt.experts.adapters import AdaptedExecutor
from eprt.experts.blackwell import scales, swizzle, trtllm_formats
from eprt.experts.blackwell.cutedsl import CuteDslExecutor
from eprt.experts.blackwell.trtllm import TrtllmGenExecutor
from eprt.quant import encode_payload
from eprt.routing import route
from eprt.tokens import ExpertMajorTokens, FlatTokens, Payload
from eprt.weights import ExpertWeights

# Without rounding between the GEMMs, only bf16 outputs differ (2 ** -9 a value; the masked kernels also write what
# leaves the first GEMM in bf16).
EXACT = 1e-2
# NVFP4 between the GEMMs: E2M1 keeps one mantissa bit, which costs up to 0.2 in norm where values spread as widely as
# products of gate and up do. FP8 keeps three.
ROUNDED = {"nvfp4": 0.2, "fp8_tensor": 0.05}
SIZES = [(96, 48), (128, 64), (160, 80), (256, 192)]  # (H, I); 2 I or H not multiples of 128 are padded
both = pytest.mark.parametrize(
    ("kind", "fake"), [(CuteDslExecutor, FakeCuteDsl), (TrtllmGenExecutor, FakeTrtllm)], ids=["cutedsl", "trtllm"]
)
FP8_SIZES = [(96, 24), (96, 40), (128, 128), (288, 160)]


def with_a_slot_more(tokens: FlatTokens) -> FlatTokens:
    """The same tokens with one more top-k entry, of no expert."""
    pad = torch.nn.functional.pad
    ids, weights = pad(tokens.ids, (0, 1), value=tokens.num_experts), pad(tokens.weights, (0, 1), value=NAN)
    return replace(tokens, ids=ids, weights=weights)


def check_flat(kind, fake, config, shard, weights, tokens, expected_tokens, bound: float) -> None:
    executor = build(kind, fake, config, shard, weights)
    out = executor(tokens)
    local = rows_with_expert(tokens, shard)
    expected = witness(config, shard, weights, expected_tokens)
    assert out.shape == (tokens.num_rows, config.hidden_size)
    assert relative_error(out[local], expected[local]) <= bound
    assert not out[~local].any(), "rows without a local expert are zeros"


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@both
def test_nvfp4_flat_tokens_that_travelled_packed(kind, fake, size, activation):
    config, shard, weights = case("nvfp4", size, ACTIVATIONS[activation])
    # A limit, and in CuteDSL alpha and beta, need one global scale for both halves: make the difference a power of two,
    # which folds exactly.
    ratio = torch.tensor([[1.0, 0.5]])[:, : config.activation.parts]
    gate_up = replace(weights.gate_up, global_scale=weights.gate_up.global_scale[:, :1] * ratio)
    weights = weights if config.activation.plain else replace(weights, gate_up=gate_up)
    tokens = packed(make_flat(config), weights)
    check_flat(kind, fake(rounding=False), config, shard, weights, tokens, tokens, EXACT)


@pytest.mark.parametrize("activation", ["gpt_oss", "deepseek_v4", "beta"])
@both
def test_a_limit_or_beta_with_any_two_global_scales(kind, fake, activation):
    """Folding rounds block scales of one half: within E4M3's half step, 2 ** -4, a block; about 0.03 in norm.
    TRTLLM-Gen folds for a limit only: its beta is divided by up's own factor."""
    config, shard, weights = case("nvfp4", (128, 64), ACTIVATIONS[activation])
    assert (weights.gate_up.global_scale[:, 1] / weights.gate_up.global_scale[:, 0] > 1.5).all()
    tokens = packed(make_flat(config), weights)
    folded = kind is CuteDslExecutor or config.activation.limit
    check_flat(kind, fake(rounding=False), config, shard, weights, tokens, tokens, 0.04 if folded else EXACT)


@both
@pytest.mark.parametrize("rounding", [False, True])
def test_nvfp4_flat_bf16_tokens(kind, fake, rounding):
    config, shard, weights = case("nvfp4", (160, 80))
    tokens = make_flat(config, dtype=torch.bfloat16)
    expected_tokens = replace(tokens, hidden=as_quantised(weights, tokens.hidden)) if rounding else tokens
    bound = ROUNDED["nvfp4"] if rounding else EXACT
    check_flat(kind, fake(rounding), config, shard, weights, tokens, expected_tokens, bound)


@pytest.mark.parametrize("activation", [SILU, RELU2], ids=["silu", "relu2"])
@pytest.mark.parametrize("size", FP8_SIZES, ids=str)
@pytest.mark.parametrize("rounding", [False, True])
def test_per_tensor_fp8(size, activation, rounding):
    config, shard, weights = case("fp8_tensor", size, activation)
    tokens = make_flat(config, dtype=torch.bfloat16)
    quantised = replace(tokens, hidden=as_quantised(weights, tokens.hidden))
    bound = ROUNDED["fp8_tensor"] if rounding else EXACT
    check_flat(TrtllmGenExecutor, FakeTrtllm(rounding), config, shard, weights, tokens, quantised, bound)


@pytest.mark.parametrize("activation", ["silu", "gpt_oss", "deepseek_v4", "beta"])
@pytest.mark.parametrize("size", FP8_SIZES, ids=str)
@pytest.mark.parametrize("travelled", [False, True])
def test_deepseek_fp8(size, activation, travelled):
    config, shard, weights = case("fp8_block", size, ACTIVATIONS[activation])
    tokens = make_flat(config, dtype=torch.bfloat16)
    data = torch.where(tokens.hidden.data.isfinite(), tokens.hidden.data, 0.0)
    payload = encode_payload(data, "fp8_block")
    given = replace(tokens, hidden=payload) if travelled else tokens
    check_flat(TrtllmGenExecutor, FakeTrtllm(), config, shard, weights, given, replace(tokens, hidden=payload), EXACT)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", [(96, 32), (128, 128), (288, 160)], ids=str)
def test_mxfp8(size, activation):
    """Tokens are MXFP8 in the kernel: 3 mantissa bits, 0.03 in norm."""
    config, shard, weights = case("mxfp8", size, ACTIVATIONS[activation])
    tokens = make_flat(config, dtype=torch.bfloat16)
    check_flat(TrtllmGenExecutor, FakeTrtllm(), config, shard, weights, tokens, tokens, 0.05)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_weight_only_checkpoints_keep_bf16_activations(activation):
    config, shard, weights = case("nvfp4", (160, 80), ACTIVATIONS[activation])
    same = weights.gate_up.global_scale.amax(1, keepdim=True).expand_as(weights.gate_up.global_scale).contiguous()
    weights = replace(
        weights,
        gate_up=replace(weights.gate_up, input_scale=None, global_scale=same),
        down=replace(weights.down, input_scale=None),
    )
    fake = FakeCuteDsl()
    tokens = make_flat(config, dtype=torch.bfloat16)
    check_flat(CuteDslExecutor, fake, config, shard, weights, tokens, tokens, EXACT)
    assert fake.calls == ["run"]


@pytest.mark.parametrize("activation", [SILU, RELU2], ids=["gated", "relu2"])
@both
def test_widths_of_real_models(kind, fake, activation):
    """H 2880 (gpt-oss) and I 1856 (Nemotron-H): padded to 2944, and to 1920 where not gated."""
    config = make_config("nvfp4", hidden_size=2880, intermediate_size=1856, activation=activation)
    config = replace(config, num_experts=2, top_k=1)
    shard = shard_of(config, 1, 2)
    weights = calibrated(shard_weights(make_weights(config), config, shard), config)
    tokens = packed(make_flat(config, num_rows=12), weights)
    check_flat(kind, fake(rounding=False), config, shard, weights, tokens, tokens, EXACT)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("travelled", [False, True])
def test_nvfp4_expert_major(size, activation, travelled):
    config, shard, weights = case("nvfp4", size, ACTIVATIONS[activation])
    flat = make_flat(config, dtype=torch.bfloat16)
    flat = packed(flat, weights) if travelled else flat
    tokens = make_expert_major(flat, shard) if not travelled else as_slabs(flat, shard)
    out = build(CuteDslExecutor, FakeCuteDsl(rounding=False), config, shard, weights)(tokens)
    expected = witness(config, shard, weights, tokens)
    valid = valid_rows(tokens)
    assert relative_error(out[valid], expected[valid]) <= EXACT


def test_expert_major_with_rounding_and_idle_experts():
    config, shard, weights = case("nvfp4", (160, 80))
    flat = make_flat(config, dtype=torch.bfloat16)
    flat = replace(flat, ids=torch.where(flat.ids == 5, config.num_experts, flat.ids))
    tokens = make_expert_major(flat, shard)
    assert tokens.counts[1] == 0
    out = build(CuteDslExecutor, FakeCuteDsl(), config, shard, weights)(tokens)
    expected = witness(config, shard, weights, replace(tokens, hidden=as_quantised(weights, tokens.hidden)))
    valid = valid_rows(tokens)
    assert relative_error(out[valid], expected[valid]) <= ROUNDED["nvfp4"]


def test_all_experts_idle():
    config, shard, weights = case("nvfp4", (128, 64))
    flat = make_flat(config, dtype=torch.bfloat16)
    flat = replace(flat, ids=torch.full_like(flat.ids, config.num_experts))
    executor = build(CuteDslExecutor, FakeCuteDsl(), config, shard, weights)
    assert not executor(flat).any()
    assert executor(make_expert_major(flat, shard)).shape == (4, 15, 128)
    assert not build(TrtllmGenExecutor, FakeTrtllm(), config, shard, weights)(flat).any()


@both
def test_zero_rows_launch_nothing(kind, fake):
    config, shard, weights = case("nvfp4", (128, 64))
    fake = fake()
    executor = build(kind, fake, config, shard, weights)
    assert executor(make_flat(config, 0, dtype=torch.bfloat16)).shape == (0, 128)
    assert fake.calls == []


@both
def test_the_first_batch_sizes_nothing(kind, fake):
    config, shard, weights = case("nvfp4", (128, 64))
    executor = build(kind, fake(rounding=False), config, shard, weights)
    for rows in (1, 40, 3):
        tokens = packed(make_flat(config, rows + 1), weights)
        local = rows_with_expert(tokens, shard)
        out, expected = executor(tokens), witness(config, shard, weights, tokens)
        assert relative_error(out[local], expected[local]) <= EXACT


@both
def test_another_number_of_slots(kind, fake):
    """A dispatcher may pad top-k with invalid slots; an adapter emits one slot."""
    config, shard, weights = case("nvfp4", (128, 64))
    tokens = packed(make_flat(config), weights)
    executor = build(kind, fake(rounding=False), config, shard, weights)
    assert torch.equal(executor(with_a_slot_more(tokens)), executor(tokens))


@both
def test_rows_of_a_hash_table_may_name_an_expert_twice(kind, fake):
    config, shard, weights = case("nvfp4", (128, 64))
    config = replace(config, routing=Routing("hash"))
    tokens = packed(make_flat(config), weights)
    slots = [0, 0, 1]
    tokens = replace(tokens, ids=tokens.ids[:, slots].contiguous(), weights=tokens.weights[:, slots].contiguous())
    check_flat(kind, fake(rounding=False), config, shard, weights, tokens, tokens, EXACT)


@both
def test_warmup_runs_the_largest_batch(kind, fake):
    config, shard, weights = case("nvfp4", (128, 64))
    fake = fake()
    executor = build(kind, fake, config, shard, weights, replace(RUNTIME, max_tokens_per_rank=8))
    executor.warmup(16)
    assert {"run", "grouped_gemm_nt_masked", "fp4"} & set(fake.calls)


def warm_cutedsl(case, token_format: str, rows: int, fake: FakeCuteDsl):
    """An executor warmed up for so many rows, in a World that is warm from then on."""
    warm = []

    def require_cold(what: str) -> None:
        if warm:
            raise UsageError(what)

    kind = type("Built", (CuteDslExecutor,), {"kernels": fake.kernels()})
    executor = kind(*case, CPU, replace(RUNTIME, token_format=token_format), require_cold)
    executor.warmup(rows)
    warm.append(True)
    return executor


@pytest.mark.parametrize("travelled", [False, True])
def test_masked_gemms_have_the_heights_of_the_warm_up(travelled):
    """FlashInfer compiles `grouped_gemm_nt_masked` for M: lower slabs are raised to what the warm-up compiled, with
    the same results, and higher ones refused."""
    config, shard, weights = case("nvfp4", (160, 80))
    fake, heights = FakeCuteDsl(rounding=False), []
    gemm = fake.grouped_gemm_nt_masked

    def noted(lhs, *args, **options):
        heights.append(lhs[0].shape[0])
        return gemm(lhs, *args, **options)

    fake.grouped_gemm_nt_masked = noted

    def slabs(rows: int) -> ExpertMajorTokens:
        flat = make_flat(config, rows, dtype=torch.bfloat16)
        return as_slabs(packed(flat, weights), shard) if travelled else make_expert_major(flat, shard)

    low, high, too_high = slabs(5), slabs(12), slabs(13)
    height = high.hidden.data.shape[1]
    assert low.hidden.data.shape[1] < height
    executor = warm_cutedsl((config, shard, weights), "expert_major", height, fake)
    for tokens in (low, high):
        valid, expected = valid_rows(tokens), witness(config, shard, weights, tokens)
        out = executor(tokens)
        assert out.shape == expected.shape
        assert relative_error(out[valid], expected[valid]) <= EXACT
    assert set(heights) == {height}
    with pytest.raises(UsageError, match=f"GEMMs for slabs of {height + 1} rows"):
        executor(too_high)


def test_cutedsl_builds_nothing_behind_a_warm_world():
    config, shard, weights = case("nvfp4", (128, 64))
    executor = warm_cutedsl((config, shard, weights), "flat", 16, FakeCuteDsl())
    tokens = make_flat(config, dtype=torch.bfloat16)
    executor(tokens)
    with pytest.raises(UsageError, match=f"for top-k {config.top_k + 1}"):
        executor(with_a_slot_more(tokens))


def test_the_ladder_holds_what_the_dispatcher_says_it_hands_over():
    """DeepEP rounds capacities up: 1 token a rank is 4 rows a slab. The fake refuses more rows than it is tuned for."""
    config, shard, weights = case("nvfp4", (128, 64))
    executor = build(TrtllmGenExecutor, FakeTrtllm(), config, shard, weights, replace(RUNTIME, max_tokens_per_rank=1))
    executor.warmup(100)


@both
@pytest.mark.parametrize("adapted", [False, True], ids=["padded top-k", "adapted slabs"])
def test_warmup_has_the_slots_that_calls_will_have(kind, fake, adapted):
    """Both libraries build and tune for a number of slots: one first met later would be built then."""
    config, shard, weights = case("nvfp4", (128, 64))
    fake = fake()
    kernels, seen = fake.kernels(), []
    if kind is CuteDslExecutor:
        make = kernels.moe_wrapper

        def noted_wrapper(**options):
            seen.append(options["top_k"])
            return make(**options)

        kernels = replace(kernels, moe_wrapper=noted_wrapper)
    else:
        routed = kernels.routed["fp4"]

        def noted(**options):
            seen.append(tuple(options["topk_ids"][0].shape))
            return routed(**options)

        kernels = replace(kernels, routed=kernels.routed | {"fp4": noted})
    noting = type("Noting", (kind,), {"kernels": kernels, "spec": replace(EXECUTORS["trtllm_gen"], formats=("flat",))})
    # CuteDSL takes slabs natively; behind an adapter it would be built for flat tokens.
    emitted = "expert_major" if adapted and kind is TrtllmGenExecutor else "flat"
    executor = noting(config, shard, weights, CPU, replace(RUNTIME, max_tokens_per_rank=8, token_format=emitted))
    if adapted:
        AdaptedExecutor(executor).warmup(16)
        assert seen == ([1] if kind is CuteDslExecutor else [(16 * shard.num_local_experts, 1)])
        return
    executor.warmup(16, config.top_k + 1)
    assert seen == ([config.top_k + 1] if kind is CuteDslExecutor else [(16, config.top_k + 1)])
    executor(with_a_slot_more(make_flat(config, dtype=torch.bfloat16)))
    assert {slots if isinstance(slots, int) else slots[1] for slots in seen} == {config.top_k + 1}
    assert kind is TrtllmGenExecutor or len(seen) == 1


def test_the_layout_follows_the_plan():
    config, shard, weights = case("nvfp4", (128, 64))
    flat = make_flat(config, dtype=torch.bfloat16)
    only_flat = build(CuteDslExecutor, FakeCuteDsl(), config, shard, weights, replace(RUNTIME, token_format="flat"))
    assert only_flat(flat).shape == flat.hidden.data.shape
    with pytest.raises(ConfigError, match="expert_major"):
        only_flat(make_expert_major(flat, shard))


def test_deterministic_asks_for_the_ordered_finalize():
    config, shard, weights = case("nvfp4", (128, 64))
    for deterministic in (False, True):
        runtime = replace(RUNTIME, deterministic=deterministic)
        executor = build(CuteDslExecutor, FakeCuteDsl(), config, shard, weights, runtime)
        executor(make_flat(config, dtype=torch.bfloat16))
        assert executor._contiguous._wrapper(config.top_k).use_fused_finalize is not deterministic


@both
def test_tokens_of_another_format_are_refused(kind, fake):
    config, shard, weights = case("nvfp4", (128, 64))
    fake = fake()
    executor = build(kind, fake, config, shard, weights)
    with pytest.raises(InputError, match="f32 tokens"):
        executor(make_flat(config))


def test_kernels_that_quantise_need_calibration():
    config, shard, weights = case("nvfp4", (128, 64))
    weights = replace(weights, gate_up=replace(weights.gate_up, input_scale=None))
    with pytest.raises(ConfigError, match="input_scale"):
        build(TrtllmGenExecutor, FakeTrtllm(), config, shard, weights)
    with pytest.raises(ConfigError, match="input_scale"):
        build(CuteDslExecutor, FakeCuteDsl(), config, shard, weights, replace(RUNTIME, token_format="expert_major"))
    config, shard, weights = case("fp8_tensor", (128, 128))
    weights = replace(weights, down=replace(weights.down, input_scale=None))
    with pytest.raises(ConfigError, match="input_scale"):
        build(TrtllmGenExecutor, FakeTrtllm(), config, shard, weights)


@pytest.mark.parametrize(("weight_format", "activation"), [("fp8_tensor", "gpt_oss"), ("fp8_block", "relu2")])
def test_activations_that_fp8_kernels_lack_are_refused(weight_format, activation):
    with pytest.raises(ConfigError, match="use another executor"):
        build(TrtllmGenExecutor, FakeTrtllm(), *case(weight_format, (128, 128), ACTIVATIONS[activation]))


@pytest.mark.parametrize(
    "routing",
    [
        Routing("softmax_topk"),
        Routing("softmax_topk", renormalize=False),
        Routing("topk_softmax"),
        Routing("grouped_sigmoid", num_groups=4, topk_groups=2, scaling_factor=2.5),
        Routing("grouped_sigmoid"),
    ],
    ids=lambda r: f"{r.method}-{r.renormalize}-{r.num_groups}",
)
@pytest.mark.parametrize("weight_format", ["nvfp4", "fp8_tensor", "fp8_block", "mxfp8"])
def test_logits_kernels_equal_routing_then_the_routed_kernel(routing, weight_format):
    config, shard, weights = case(weight_format, (128, 128))
    config = replace(config, routing=routing)
    grouped = routing.method == "grouped_sigmoid"
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(9, config.num_experts, generator=generator)
    bias = torch.randn(config.num_experts, generator=generator) / 4 if grouped else None
    hidden = Payload.plain(torch.randn(9, config.hidden_size, generator=generator).to(torch.bfloat16))
    executor = build(TrtllmGenExecutor, FakeTrtllm(), config, shard, weights)
    topk = route(logits, routing, config.top_k, correction_bias=bias)
    expected = executor(FlatTokens(hidden, topk.ids, topk.weights, config.num_experts))
    assert relative_error(executor.run_logits(hidden, logits, bias), expected) <= 1e-2


@pytest.mark.parametrize(
    ("routing", "num_experts", "top_k", "taken"),
    [
        (Routing("softmax_topk"), 8, 3, True),
        (Routing("softmax_topk", scaling_factor=2.0), 8, 3, False),
        (Routing("sqrt_softplus"), 8, 3, False),
        (Routing("hash"), 8, 3, False),
        (Routing("grouped_sigmoid", num_groups=8, topk_groups=4, scaling_factor=2.5), 256, 8, True),
        (Routing("grouped_sigmoid", renormalize=False, num_groups=8, topk_groups=4), 256, 8, False),
        (Routing("grouped_sigmoid", num_groups=16, topk_groups=4), 256, 8, False),
        (Routing("grouped_sigmoid", num_groups=4, topk_groups=2), 256, 8, False),
        (Routing("grouped_sigmoid"), 384, 9, False),
        (Routing("grouped_sigmoid"), 512, 22, True),
        (Routing("grouped_sigmoid"), 1024, 8, False),
    ],
)
def test_only_routings_that_the_logits_kernels_have_bypass_the_router(routing, num_experts, top_k, taken):
    config = make_config("nvfp4", num_experts=num_experts, top_k=top_k, routing=routing)
    assert rules.trtllm_logits(config) is taken


def test_a_routing_that_kernels_lack_is_refused():
    config, shard, weights = case("nvfp4", (128, 64))
    hidden = Payload.plain(torch.zeros(2, 128, dtype=torch.bfloat16))
    for routing in (Routing("sqrt_softplus"), Routing("softmax_topk", scaling_factor=2.0)):
        executor = build(TrtllmGenExecutor, FakeTrtllm(), replace(config, routing=routing), shard, weights)
        with pytest.raises(ConfigError, match=routing.method):
            executor.run_logits(hidden, torch.zeros(2, config.num_experts))
    executor = build(TrtllmGenExecutor, FakeTrtllm(), config, shard, weights)
    with pytest.raises(InputError, match=r"expected \[2, 8\]"):
        executor.run_logits(hidden, torch.zeros(2, 3))
    assert executor.run_logits(Payload.plain(hidden.data[:0]), torch.zeros(0, 8)).shape == (0, 128)


def gate_scale_for_up(weights: ExpertWeights) -> ExpertWeights:
    scale = weights.gate_up.global_scale[:, :1].expand(-1, 2).contiguous()
    return replace(weights, gate_up=replace(weights.gate_up, global_scale=scale))


def swapped_halves(weights: ExpertWeights) -> ExpertWeights:
    gate_up = weights.gate_up.map(lambda t: t.view(torch.uint8) if t.dtype.itemsize == 1 else t)
    codes, scales = swizzle.swap_halves(gate_up.codes), swizzle.swap_halves(gate_up.scales)
    return replace(weights, gate_up=replace(weights.gate_up, codes=codes, scales=scales.view(torch.float8_e4m3fn)))


def late_padding(matrix, parts, rows, cols):
    """Everything after the last row, as if the halves were one matrix."""
    L, total, width = matrix.shape
    padded = matrix.new_zeros((L, parts * rows, cols))
    padded[:, :total, :width] = matrix
    return padded


@pytest.mark.parametrize(
    ("kind", "fake", "where", "slabs"),
    [
        (CuteDslExecutor, FakeCuteDsl, scales, False),
        (CuteDslExecutor, FakeCuteDsl, scales, True),
        (TrtllmGenExecutor, FakeTrtllm, trtllm_formats, False),
    ],
    ids=["cutedsl", "cutedsl-masked", "trtllm"],
)
@pytest.mark.parametrize("mistake", ["unswizzled", "late padding", "gate's scale for up", "swapped halves", "none"])
def test_wrong_layouts_fail(kind, fake, where, slabs, mistake, monkeypatch):
    """An executor built with a function or its weights replaced; a broken kernel contract is an infinite error."""
    config, shard, weights = case("nvfp4", (128, 48) if mistake == "late padding" else (128, 64))
    flat = packed(make_flat(config), weights)
    tokens = as_slabs(flat, shard) if slabs else flat
    compared = valid_rows(tokens) if slabs else rows_with_expert(flat, shard)
    expected = witness(config, shard, weights, tokens)
    if mistake == "unswizzled":
        monkeypatch.setattr(where, "swizzle_scales", lambda scales: scales)
    if mistake == "late padding":
        monkeypatch.setattr(where, "pad_parts", late_padding)
    changes = {"gate's scale for up": gate_scale_for_up, "swapped halves": swapped_halves}
    changed = changes.get(mistake, lambda weights: weights)(weights)
    try:
        out = build(kind, fake(rounding=False), config, shard, changed)(tokens)
        error = relative_error(out[compared], expected[compared])
    except AssertionError:
        error = float("inf")
    assert (error <= EXACT) is (mistake == "none"), error


@pytest.mark.parametrize("weight_format", ["fp8_tensor", "fp8_block", "mxfp8"])
@pytest.mark.parametrize("mistake", ["canonical rows", "none"])
def test_wrong_fp8_rows_fail(weight_format, mistake, monkeypatch):
    """Rows left as [gate; up]."""
    if mistake == "canonical rows":
        monkeypatch.setattr(trtllm_formats, "take_rows", lambda matrix, order: matrix)
        monkeypatch.setattr(trtllm_formats, "swap_halves", lambda matrix: matrix)
    config, shard, weights = case(weight_format, (128, 128))
    tokens = make_flat(config, dtype=torch.bfloat16)
    out = build(TrtllmGenExecutor, FakeTrtllm(rounding=False), config, shard, weights)(tokens)
    local = rows_with_expert(tokens, shard)
    error = relative_error(out[local], witness(config, shard, weights, tokens)[local])
    assert (error <= 0.05) is (mistake == "none"), error
