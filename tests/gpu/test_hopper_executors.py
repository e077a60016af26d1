"""humming and cutlass_mxfp4 on one Hopper GPU, against the reference executor: never against their own kernels.

A rank's share needs no other rank: shares run one after another and are summed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from support.cases import grouped_cases
from support.cases.expert_cases import DEEPSEEK_V4, RELU2, RUNTIME, SILU, shard_of
from support.cases.grouped_cases import BOUND, all_experts, check_replays, make_slabs, make_tokens, witness

from eprt.bench.baselines import baselines
from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.conformance.oracle import relative_error, shard_weights
from eprt.expert_major import expert_major_from_flat
from eprt.experts import make_executor
from eprt.experts.base import AdaptedExecutor
from eprt.experts.humming import gemm as humming_gemm
from eprt.placement import ExpertPlacement
from eprt.quant import encode_payload
from eprt.tokens import Payload
from eprt.weights import ExpertWeights, Mxfp4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(480),  # the first to use a shape compiles its kernels
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]

CUDA = torch.device("cuda", 0)
FP8_BOUND = 6e-2  # of FP8 activations: e4m3 keeps 3 bits, twice
layer = partial(grouped_cases.layer, E=8, K=4)

CASES = {
    "gpt_oss": layer("mxfp4", 2880, 2880),
    "deepseek_v4": layer("mxfp4", 4096, 2048, activation=DEEPSEEK_V4, bias=False, K=6),
    "mxfp4_odd": layer("mxfp4", 96, 1856),
    "mxfp4_relu2": layer("mxfp4", 96, 96, activation=RELU2),
    "nvfp4": layer("nvfp4", 2880, 1856),
    "nvfp4_plain": layer("nvfp4", 96, 48, activation=SILU, bias=False),
    "fp8_tensor_24": layer("fp8_tensor", 96, 24),
    "fp8_tensor_40": layer("fp8_tensor", 96, 40),
    "fp8_block_40": layer("fp8_block", 96, 40),
    "fp8_block": layer("fp8_block", 2880, 1856, activation=DEEPSEEK_V4, bias=False),
}
RUNS = [
    pytest.param(executor, case, id=f"{executor}-{case}")
    for executor, cases in {"humming": list(CASES), "cutlass_mxfp4": ["gpt_oss", "deepseek_v4", "mxfp4_odd"]}.items()
    for case in cases
]
both = pytest.mark.parametrize("executor", ["humming", "cutlass_mxfp4"])


def given(*config, rows=64, **options):
    made = config[0] if isinstance(config[0], MoEConfig) else layer(*config, **options)
    return made, all_experts(made, growth=1.0), make_tokens(made, rows)


def build(executor, config, weights, shard=None, runtime=RUNTIME):
    shard = shard or shard_of(config)
    return make_executor(executor, config, shard, shard_weights(weights, config, shard), CUDA, runtime)


@pytest.mark.parametrize(("executor", "case"), RUNS)
def test_equals_the_reference(executor, case):
    config = CASES[case]
    weights = all_experts(config, growth=1.0)
    runner = build(executor, config, weights)
    for num_rows in (0, 1, 3, 64, 1000):
        tokens = make_tokens(config, num_rows)
        out = torch.full((num_rows, config.hidden_size), float("nan"), dtype=torch.bfloat16, device=CUDA)
        assert runner(tokens, out) is out
        if num_rows:
            expected = witness(config, weights, tokens)
            assert relative_error(out, expected) <= BOUND, num_rows
            assert torch.equal(out[4::5], torch.zeros_like(out[4::5]))


@both
@pytest.mark.parametrize("moe_tp_size", [1, 2])
@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_shares_add_up_to_the_layer(executor, ep_size, moe_tp_size):
    config, weights, tokens = given("mxfp4", 2880, 192)
    placement = ExpertPlacement(config.num_experts, ParallelConfig(ep_size * moe_tp_size, moe_tp_size=moe_tp_size))
    total = torch.zeros(64, config.hidden_size, device=CUDA)
    for rank in range(ep_size * moe_tp_size):
        total += build(executor, config, weights, placement.shard(rank))(tokens).float()
    assert relative_error(total, witness(config, weights, tokens)) <= BOUND


@both
def test_rows_of_other_ranks(executor):
    """Rows with nothing local: zeros if they are read, else whatever the executor likes, but never a wrong row."""
    config = layer("mxfp4", 96, 96)
    weights, shard = all_experts(config, growth=1.0), ExpertPlacement(8, ParallelConfig(4)).shard(2)
    runner = build(executor, config, weights, shard)
    tokens = make_tokens(config, 64)
    local = ((tokens.ids >= shard.first_expert) & (tokens.ids < shard.end_expert)).any(1)
    assert 0 < int(local.sum()) < 64
    expected = witness(config, weights, tokens, shard)
    for every_row_read in (True, False):
        out = torch.full((64, 96), 7.0, dtype=torch.bfloat16, device=CUDA)
        runner(replace(tokens, every_row_read=every_row_read), out)
        assert relative_error(out[local], expected[local]) <= BOUND
        if every_row_read:
            assert not out[~local].any()
        elif executor == "humming":
            assert (out[~local] == 7).all()
    nothing = replace(tokens, ids=torch.full_like(tokens.ids, 8))
    assert not runner(nothing).any()


@pytest.mark.parametrize(
    ("executor", "case"), [*product(["humming"], ["gpt_oss", "nvfp4", "fp8_block_40"]), ("cutlass_mxfp4", "gpt_oss")]
)
def test_expert_major(executor, case):
    """Slabs with empty experts; rows past the counts are NaN."""
    config = CASES[case]
    weights, shard = all_experts(config, growth=1.0), shard_of(config)
    flat = make_tokens(config, 50)
    flat = replace(flat, ids=torch.where(flat.ids == 3, config.num_experts, flat.ids))
    slabs, past = make_slabs(flat, shard, 60)
    expected, runner = witness(config, weights, slabs), build(executor, config, weights)
    adapted = AdaptedExecutor(runner)
    adapted.native_formats = ("flat",)  # humming takes slabs itself: forces it through the adapter, too
    for each in (runner, adapted) if executor == "humming" else (adapted,):
        assert relative_error(each(slabs)[~past], expected[~past]) <= BOUND


@pytest.mark.parametrize("payload", ["f32", "fp8_block", "nvfp4"])
@both
def test_other_payloads(executor, payload):
    config, weights, tokens = given("mxfp4", 96, 96, rows=32)
    hidden = torch.nan_to_num(tokens.hidden.data.float())
    tokens = replace(tokens, hidden=encode_payload(hidden, payload))
    expected = witness(config, weights, tokens)
    out = build(executor, config, weights)(tokens)
    assert out.dtype == (torch.float32 if payload == "f32" else torch.bfloat16)
    assert relative_error(out, expected) <= BOUND


@pytest.mark.parametrize("case", ["gpt_oss", "mxfp4_relu2", "fp8_tensor_40", "fp8_block"])
def test_fp8_activations_are_within_their_bound(case):
    config, weights, tokens = given(CASES[case])
    runner = build("humming", config, weights, runtime=RuntimeConfig(low_precision_activations=True))
    found = relative_error(runner(tokens), witness(config, weights, tokens))
    assert BOUND / 10 < found <= FP8_BOUND
    shard = shard_of(config)
    slabs, _ = expert_major_from_flat(replace(tokens, hidden=Payload.plain(tokens.hidden.data.nan_to_num())), shard, 64)
    expected = witness(config, weights, slabs)
    valid = torch.arange(64, device=CUDA)[None] < slabs.counts[:, None]
    assert relative_error(runner(slabs)[valid], expected[valid]) <= FP8_BOUND


@both
def test_deterministic_repeats_bit_for_bit(executor):
    config, weights, tokens = given("mxfp4", 2880, 192, rows=200)
    runner = build(executor, config, weights, runtime=RuntimeConfig(deterministic=True))
    first = runner(tokens)
    assert relative_error(first, witness(config, weights, tokens)) <= BOUND
    assert all(torch.equal(first, runner(tokens)) for _ in range(5))


def _swapped(weights, parts):
    half = weights.gate_up.shape[1] // 2
    bias = None if weights.gate_up_bias is None else weights.gate_up_bias.roll(half, 1)
    roll = {name: t.roll(half if name != "global_scale" else 1, 1) for name, t in weights.gate_up.tensors().items()}
    return replace(weights, gate_up=replace(weights.gate_up, **roll), gate_up_bias=bias)


@both
def test_swapped_halves_would_be_seen(executor):
    config, weights, tokens = given("mxfp4", 96, 96)
    out = build(executor, config, _swapped(weights, 2))(tokens)
    assert relative_error(out, witness(config, weights, tokens)) > 0.1


@both
def test_padding_after_concatenation_would_be_seen(executor, monkeypatch):
    from eprt.experts import cutlass_mxfp4
    from eprt.experts.padding import pad_parts

    def wrong(stack, parts, rows, cols=None, *, reverse=False):
        if reverse:
            stack = stack.roll(stack.shape[1] // 2, 1)
        return pad_parts(stack, 1, parts * rows, cols)

    config, weights, tokens = given("mxfp4", 96, 96)
    monkeypatch.setattr(humming_gemm, "pad_parts", wrong)
    monkeypatch.setattr(cutlass_mxfp4, "pad_parts", wrong)
    assert relative_error(build(executor, config, weights)(tokens), witness(config, weights, tokens)) > 0.1


@pytest.mark.parametrize("weight_format", ["nvfp4", "fp8_tensor"])
def test_gate_scale_used_for_up_would_be_seen(weight_format):
    config, weights, tokens = given(weight_format, 96, 48)
    name = "global_scale" if weight_format == "nvfp4" else "scale"
    scale = getattr(weights.gate_up, name)
    assert (scale[:, 0] != scale[:, 1]).all()
    wrong = replace(weights, gate_up=replace(weights.gate_up, **{name: scale[:, :1].expand(-1, 2).contiguous()}))
    assert relative_error(build("humming", config, wrong)(tokens), witness(config, weights, tokens)) > 0.1


@both
@pytest.mark.parametrize("bare", [False, True], ids=["eprt", "by_hand"])
def test_graph_replays_with_other_counts(executor, bare):
    """Captured once. So is the bench's peer."""
    config = layer("mxfp4", 2880, 192)
    weights, shard = all_experts(config, growth=1.0), ExpertPlacement(8, ParallelConfig(2)).shard(1)
    runner = build(executor, config, weights, shard)
    static = make_tokens(config, 64)
    peer = baselines().direct_call(runner, static)
    assert peer is not None
    call = (lambda: peer().clone()) if bare else partial(runner, static)
    call()
    check_replays(call, config, weights, shard, static)


@pytest.mark.parametrize("source", ["cpu", "cuda"])
@both
def test_preparation_streams_expert_by_expert(executor, source):
    """Peak beyond the result <= an eighth of the layer, at gpt-oss's EP4 share."""
    config = layer("mxfp4", 2880, 2880, E=128)
    shard = ExpertPlacement(128, ParallelConfig(4)).shard(0)
    L, H, I = 32, 2880, 2880
    codes = lambda *shape: torch.randint(0, 256, shape, dtype=torch.uint8)  # noqa: E731
    weights = ExpertWeights(
        Mxfp4(codes(L, 2 * I, H // 2), torch.full((L, 2 * I, H // 32), 118, dtype=torch.uint8)),
        Mxfp4(codes(L, H, I // 2), torch.full((L, H, I // 32), 118, dtype=torch.uint8)),
        torch.zeros(L, 2 * I),
        torch.zeros(L, H),
    ).to(source)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    runner = make_executor(executor, config, shard, weights, CUDA, RUNTIME)
    held = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    assert held >= 0.9 * weights.nbytes
    assert peak - held <= weights.nbytes / 8
    assert runner.shard is shard


@both
def test_results_stay_after_a_warmup(executor):
    config, weights, tokens = given("mxfp4", 96, 96, rows=4)
    runner = build(executor, config, weights)
    runner.warmup(4)
    assert relative_error(runner(tokens), witness(config, weights, tokens)) <= BOUND
