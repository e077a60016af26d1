"""The Blackwell executors whole, on kernels that check their arguments and read the prepared tensors by documented
addresses (`sm100_kernels`), against the float32 witness."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from support.cases import expert_cases as cases
from support.cases.sm100_cases import ACTIVATIONS, as_quantised, as_slabs, build, calibrated, case, packed, witness
from support.stand_ins.cutedsl_kernels import FakeCuteDsl
from support.stand_ins.trtllm_kernels import FakeTrtllm

from eprt.config import Routing
from eprt.conformance.oracle import relative_error, shard_weights
from eprt.errors import ConfigError, InputError, UsageError
from eprt.experts import EXECUTORS
from eprt.experts.base import AdaptedExecutor
from eprt.experts.blackwell.cutedsl import CuteDslExecutor
from eprt.experts.blackwell.trtllm import TrtllmGenExecutor
from eprt.quant import encode_payload
from eprt.tokens import ExpertMajorTokens, FlatTokens
from eprt.weights import ExpertWeights

# Without rounding between the GEMMs, only bf16 outputs differ (2 ** -9 a value; the masked kernels also write what
# leaves the first GEMM in bf16).
EXACT = 1e-2
# NVFP4 between the GEMMs: E2M1 keeps one mantissa bit, which costs up to 0.2 in norm where values spread as widely as
# products of gate and up do. FP8 keeps three.
NVFP4_ROUNDED, FP8_ROUNDED = 0.2, 0.05
# Folding two global scales into one rounds block scales of one half: within E4M3's half step, 2 ** -4, a block.
FOLDED = 0.04
SIZES = [(96, 48), (160, 80), (256, 192)]  # (H, I); 2 I or H not multiples of 128 are padded
FP8_SIZES = [(96, 24), (128, 128), (288, 160)]
KINDS = {"cutedsl": (CuteDslExecutor, FakeCuteDsl), "trtllm": (TrtllmGenExecutor, FakeTrtllm)}
both = pytest.mark.parametrize(("kind", "fake"), KINDS.values(), ids=KINDS)

# What of the weights is changed: scales as they are; one global scale twice the other, which folds exactly; as of a
# checkpoint that says nothing of activations.
AS_IS, FOLDABLE, WEIGHT_ONLY = "as they are", "foldable", "weight-only"
# What the tokens are: packed as NVFP4 or FP8 blocks when they travelled, bf16 that the kernel keeps, or bf16 that is
# quantised before the first GEMM.
PACKED, BLOCKS, BF16, QUANTISED, TO_BLOCKS = "packed", "blocks", "bf16", "quantised", "to blocks"
# Executor, format, (H, I), activation, weights, tokens, (rounding between the GEMMs, bound).
FLAT = [
    *product(KINDS, ["nvfp4"], SIZES, ACTIVATIONS, [FOLDABLE], [PACKED], [(False, EXACT)]),
    *product(KINDS, ["nvfp4"], [(128, 64)], ["gpt_oss", "deepseek_v4"], [AS_IS], [PACKED], [(False, FOLDED)]),
    ("cutedsl", "nvfp4", (128, 64), "beta", AS_IS, PACKED, (False, FOLDED)),
    # TRTLLM-Gen folds for a limit only: its beta is divided by up's own factor.
    ("trtllm", "nvfp4", (128, 64), "beta", AS_IS, PACKED, (False, EXACT)),
    *product(KINDS, ["nvfp4"], [(160, 80)], ["silu"], [AS_IS], [BF16], [(False, EXACT)]),
    *product(KINDS, ["nvfp4"], [(160, 80)], ["silu"], [AS_IS], [QUANTISED], [(True, NVFP4_ROUNDED)]),
    *product(["cutedsl"], ["nvfp4"], [(160, 80)], ACTIVATIONS, [WEIGHT_ONLY], [BF16], [(True, EXACT)]),
    *product(
        *(["trtllm"], ["fp8_tensor"], FP8_SIZES, ["silu", "relu2"], [AS_IS], [QUANTISED]),
        [(False, EXACT), (True, FP8_ROUNDED)],
    ),
    *product(
        *(["trtllm"], ["fp8_block"], FP8_SIZES, ["silu", "gpt_oss", "deepseek_v4", "beta"], [AS_IS]),
        *([BLOCKS, TO_BLOCKS], [(True, EXACT)]),
    ),
    # Tokens are MXFP8 in the kernel: 3 mantissa bits, 0.03 in norm.
    *product(
        *(["trtllm"], ["mxfp8"], [(96, 32), (128, 128), (288, 160)], ACTIVATIONS, [AS_IS], [BF16]),
        [(True, FP8_ROUNDED)],
    ),
]


def with_scales(weights: ExpertWeights, how: str) -> ExpertWeights:
    scale = weights.gate_up.global_scale if how != AS_IS else None
    if how == FOLDABLE:
        ratio = torch.tensor([1.0, 0.5])[: scale.shape[1]]
        return replace(weights, gate_up=replace(weights.gate_up, global_scale=scale[:, :1] * ratio))
    if how == WEIGHT_ONLY:
        same = scale.amax(1, keepdim=True).expand_as(scale).contiguous()
        gate_up = replace(weights.gate_up, input_scale=None, global_scale=same)
        return replace(weights, gate_up=gate_up, down=replace(weights.down, input_scale=None))
    return weights


def tokens_of(how: str, config, weights: ExpertWeights) -> tuple[FlatTokens, FlatTokens]:
    """The tokens that the executor gets, and what they are worth in its first GEMM."""
    if how == PACKED:
        return (packed(cases.make_flat(config), weights),) * 2
    tokens = cases.make_flat(config, dtype=torch.bfloat16)
    if how == BF16:
        return tokens, tokens
    if how == QUANTISED:
        return tokens, replace(tokens, hidden=as_quantised(weights, tokens.hidden))
    data = torch.where(tokens.hidden.data.isfinite(), tokens.hidden.data, 0.0)
    blocks = replace(tokens, hidden=encode_payload(data, "fp8_block"))
    return blocks if how == BLOCKS else tokens, blocks


def with_a_slot_more(tokens: FlatTokens) -> FlatTokens:
    """The same tokens with one more top-k entry, of no expert."""
    pad = torch.nn.functional.pad
    ids, weights = pad(tokens.ids, (0, 1), value=tokens.num_experts), pad(tokens.weights, (0, 1), value=cases.NAN)
    return replace(tokens, ids=ids, weights=weights)


def check_flat(executor, config, shard, weights, tokens, bound: float = EXACT, seen: FlatTokens | None = None) -> None:
    out = executor(tokens)
    local = cases.rows_with_expert(tokens, shard)
    expected = witness(config, shard, weights, seen or tokens)
    assert out.shape == (tokens.num_rows, config.hidden_size)
    assert relative_error(out[local], expected[local]) <= bound
    assert not out[~local].any(), "rows without a local expert are zeros"


def check_slabs(executor, config, shard, weights, tokens, bound: float = EXACT, seen=None) -> None:
    out, expected, valid = executor(tokens), witness(config, shard, weights, seen or tokens), cases.valid_rows(tokens)
    assert out.shape == expected.shape
    assert relative_error(out[valid], expected[valid]) <= bound


@pytest.mark.parametrize(("name", "weight_format", "size", "activation", "scales", "how", "sums"), FLAT, ids=str)
def test_flat_tokens(name, weight_format, size, activation, scales, how, sums):
    (kind, fake), (rounding, bound) = KINDS[name], sums
    config, shard, weights = case(weight_format, size, ACTIVATIONS[activation])
    if scales == FOLDABLE and config.activation.plain:
        scales = AS_IS  # nothing has to be folded
    weights, fake = with_scales(weights, scales), fake(rounding)
    if bound == FOLDED:
        assert (weights.gate_up.global_scale[:, 1] / weights.gate_up.global_scale[:, 0] > 1.5).all()
    tokens, seen = tokens_of(how, config, weights)
    check_flat(build(kind, fake, config, shard, weights), config, shard, weights, tokens, bound, seen)
    if scales == WEIGHT_ONLY:
        assert fake.calls == ["run"], "bf16 activations are kept"


@pytest.mark.parametrize("size", [(2880, 192), (320, 1856)], ids=str)
@pytest.mark.parametrize("activation", [cases.SILU, cases.RELU2], ids=["gated", "relu2"])
@both
def test_widths_of_real_models(kind, fake, activation, size):
    """H 2880 (gpt-oss) and I 1856 (Nemotron-H): padded to 2944, and to 1920 where not gated."""
    config = cases.make_config("nvfp4", hidden_size=size[0], intermediate_size=size[1], activation=activation)
    config = replace(config, num_experts=2, top_k=1)
    shard = cases.shard_of(config, 1, 2)
    weights = calibrated(shard_weights(cases.make_weights(config), config, shard), config)
    tokens = packed(cases.make_flat(config, num_rows=12), weights)
    check_flat(build(kind, fake(rounding=False), config, shard, weights), config, shard, weights, tokens)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("how", [PACKED, BF16])
def test_nvfp4_expert_major(size, activation, how):
    config, shard, weights = case("nvfp4", size, ACTIVATIONS[activation])
    flat, _ = tokens_of(how, config, weights)
    tokens = as_slabs(flat, shard) if how == PACKED else cases.make_expert_major(flat, shard)
    executor = build(CuteDslExecutor, FakeCuteDsl(rounding=False), config, shard, weights)
    check_slabs(executor, config, shard, weights, tokens)


def test_expert_major_with_rounding_and_idle_experts():
    config, shard, weights = case("nvfp4", (160, 80))
    flat = cases.make_flat(config, dtype=torch.bfloat16)
    flat = replace(flat, ids=torch.where(flat.ids == 5, config.num_experts, flat.ids))
    tokens = cases.make_expert_major(flat, shard)
    assert tokens.counts[1] == 0
    seen = replace(tokens, hidden=as_quantised(weights, tokens.hidden))
    executor = build(CuteDslExecutor, FakeCuteDsl(), config, shard, weights)
    check_slabs(executor, config, shard, weights, tokens, NVFP4_ROUNDED, seen)


@both
def test_zero_rows_launch_nothing_and_all_experts_may_be_idle(kind, fake):
    config, shard, weights = case("nvfp4", (128, 64))
    fake = fake()
    executor = build(kind, fake, config, shard, weights)
    assert executor(cases.make_flat(config, 0, dtype=torch.bfloat16)).shape == (0, 128)
    assert fake.calls == []
    flat = cases.make_flat(config, dtype=torch.bfloat16)
    flat = replace(flat, ids=torch.full_like(flat.ids, config.num_experts))
    assert not executor(flat).any()
    if kind is CuteDslExecutor:
        assert executor(cases.make_expert_major(flat, shard)).shape == (4, 15, 128)


@both
def test_the_first_batch_sizes_nothing(kind, fake):
    config, shard, weights = case("nvfp4", (128, 64))
    executor = build(kind, fake(rounding=False), config, shard, weights)
    for rows in (1, 40, 3):
        check_flat(executor, config, shard, weights, packed(cases.make_flat(config, rows + 1), weights))


@both
def test_rows_of_a_hash_table_may_name_an_expert_twice(kind, fake):
    config, shard, weights = case("nvfp4", (128, 64))
    config = replace(config, routing=Routing("hash"))
    tokens = packed(cases.make_flat(config), weights)
    slots = [0, 0, 1]
    tokens = replace(tokens, ids=tokens.ids[:, slots].contiguous(), weights=tokens.weights[:, slots].contiguous())
    check_flat(build(kind, fake(rounding=False), config, shard, weights), config, shard, weights, tokens)


def warm_cutedsl(case, token_format: str, rows: int, fake: FakeCuteDsl):
    """An executor warmed up for so many rows, in a World that is warm from then on."""
    warm = []

    def require_cold(what: str) -> None:
        if warm:
            raise UsageError(what)

    kind = type("Built", (CuteDslExecutor,), {"kernels": fake.kernels()})
    executor = kind(*case, cases.CPU, replace(cases.RUNTIME, token_format=token_format), require_cold)
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
        flat = cases.make_flat(config, rows, dtype=torch.bfloat16)
        return as_slabs(packed(flat, weights), shard) if travelled else cases.make_expert_major(flat, shard)

    low, high, too_high = slabs(5), slabs(12), slabs(13)
    height = high.hidden.data.shape[1]
    assert low.hidden.data.shape[1] < height
    executor = warm_cutedsl((config, shard, weights), "expert_major", height, fake)
    for tokens in (low, high):
        check_slabs(executor, config, shard, weights, tokens)
    assert set(heights) == {height}
    with pytest.raises(UsageError, match=f"GEMMs for {height + 1} rows per expert"):
        executor(too_high)


def test_cutedsl_builds_nothing_behind_a_warm_world():
    config, shard, weights = case("nvfp4", (128, 64))
    executor = warm_cutedsl((config, shard, weights), "flat", 16, FakeCuteDsl())
    tokens = cases.make_flat(config, dtype=torch.bfloat16)
    executor(tokens)
    with pytest.raises(UsageError, match=f"for top-k {config.top_k + 1}"):
        executor(with_a_slot_more(tokens))


def test_the_ladder_holds_what_the_dispatcher_says_it_hands_over():
    """DeepEP rounds capacities up: 1 token a rank is 4 rows a slab. The fake refuses more rows than it is tuned for."""
    config, shard, weights = case("nvfp4", (128, 64))
    executor = build(
        TrtllmGenExecutor, FakeTrtllm(), config, shard, weights, replace(cases.RUNTIME, max_tokens_per_rank=1)
    )
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

        kernels.moe_wrapper = noted_wrapper
    else:
        routed = kernels.routed["fp4"]

        def noted(**options):
            seen.append(tuple(options["topk_ids"][0].shape))
            return routed(**options)

        kernels.routed["fp4"] = noted
    noting = type("Noting", (kind,), {"kernels": kernels, "spec": replace(EXECUTORS["trtllm_gen"], formats=("flat",))})
    # CuteDSL takes slabs natively; behind an adapter it would be built for flat tokens.
    emitted = "expert_major" if adapted and kind is TrtllmGenExecutor else "flat"
    executor = noting(
        config, shard, weights, cases.CPU, replace(cases.RUNTIME, max_tokens_per_rank=8, token_format=emitted)
    )
    if adapted:
        AdaptedExecutor(executor).warmup(16)
        assert seen == ([1] if kind is CuteDslExecutor else [(16 * shard.num_local_experts, 1)])
        return
    executor.warmup(16, config.top_k + 1)
    assert seen == ([config.top_k + 1] if kind is CuteDslExecutor else [(16, config.top_k + 1)])
    tokens = packed(cases.make_flat(config), weights)
    wide = executor(with_a_slot_more(tokens))
    assert {slots if isinstance(slots, int) else slots[1] for slots in seen} == {config.top_k + 1}
    assert kind is TrtllmGenExecutor or len(seen) == 1
    assert torch.equal(wide, executor(tokens))


def test_tokens_that_an_executor_was_not_built_for_are_refused():
    config, shard, weights = case("nvfp4", (128, 64))
    flat = cases.make_flat(config, dtype=torch.bfloat16)
    only_flat = build(
        CuteDslExecutor, FakeCuteDsl(), config, shard, weights, replace(cases.RUNTIME, token_format="flat")
    )
    assert only_flat(flat).shape == flat.hidden.data.shape
    with pytest.raises(ConfigError, match="expert_major"):
        only_flat(cases.make_expert_major(flat, shard))
    for kind, fake in KINDS.values():
        with pytest.raises(InputError, match="f32 tokens"):
            build(kind, fake(), config, shard, weights)(cases.make_flat(config))


def test_deterministic_asks_for_the_ordered_finalize():
    config, shard, weights = case("nvfp4", (128, 64))
    for deterministic in (False, True):
        runtime = replace(cases.RUNTIME, deterministic=deterministic)
        executor = build(CuteDslExecutor, FakeCuteDsl(), config, shard, weights, runtime)
        executor(cases.make_flat(config, dtype=torch.bfloat16))
        assert executor._contiguous._wrapper(config.top_k).use_fused_finalize is not deterministic


UNCALIBRATED = [  # executor, format, the matrix without an input scale
    ("trtllm", "nvfp4", "gate_up"),
    ("cutedsl", "nvfp4", "gate_up"),
    ("trtllm", "fp8_tensor", "down"),
]


@pytest.mark.parametrize(("name", "weight_format", "uncalibrated"), UNCALIBRATED)
def test_checkpoints_without_the_scales_that_kernels_need_are_refused(name, weight_format, uncalibrated):
    kind, fake = KINDS[name]
    config, shard, weights = case(weight_format, (128, 128))
    weights = replace(weights, **{uncalibrated: replace(getattr(weights, uncalibrated), input_scale=None)})
    runtime = replace(cases.RUNTIME, token_format="expert_major") if name == "cutedsl" else cases.RUNTIME
    with pytest.raises(ConfigError, match="input_scale"):
        build(kind, fake(), config, shard, weights, runtime)
