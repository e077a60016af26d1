"""humming and cutlass_mxfp4 on one Hopper GPU, against the reference executor: never against their own kernels.

A rank's share needs no other rank: shares run one after another and are summed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.cases.expert_cases import DEEPSEEK_V4, GPT_OSS, RELU2, cut, relative_error, shard_of

from eprt.bench.baselines import baselines
from eprt.config import Activation, MoEConfig, ParallelConfig, RuntimeConfig
from eprt.expert_major import expert_major_from_flat
from eprt.experts import make_executor
from eprt.experts.adapters import AdaptedExecutor
from eprt.experts.humming import gemm as humming_gemm
from eprt.experts.reference import ReferenceExecutor
from eprt.placement import ExpertPlacement
from eprt.quant import encode, encode_payload
from eprt.tokens import FlatTokens, Payload
from eprt.weights import ExpertWeights, Mxfp4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(480),  # the first to use a shape compiles its kernels
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]

CUDA = torch.device("cuda", 0)
RUNTIME = RuntimeConfig()
BOUND = 1e-2  # relative norm error of bf16 activations
FP8_BOUND = 6e-2  # of FP8 activations: e4m3 keeps 3 bits, twice


def layer(weight_format, H, I, activation=GPT_OSS, bias=True, E=8, K=4):
    return MoEConfig(E, K, H, I, activation=activation, bias=bias, weight_format=weight_format)


CASES = {
    "gpt_oss": ("mxfp4", layer("mxfp4", 2880, 2880)),
    "deepseek_v4": ("mxfp4", layer("mxfp4", 4096, 2048, DEEPSEEK_V4, bias=False, K=6)),
    "mxfp4_odd": ("mxfp4", layer("mxfp4", 96, 1856)),
    "mxfp4_relu2": ("mxfp4", layer("mxfp4", 96, 96, RELU2)),
    "nvfp4": ("nvfp4", layer("nvfp4", 2880, 1856)),
    "nvfp4_plain": ("nvfp4", layer("nvfp4", 96, 48, Activation(), bias=False)),
    "fp8_tensor_24": ("fp8_tensor", layer("fp8_tensor", 96, 24)),
    "fp8_tensor_40": ("fp8_tensor", layer("fp8_tensor", 96, 40)),
    "fp8_block_40": ("fp8_block", layer("fp8_block", 96, 40)),
    "fp8_block": ("fp8_block", layer("fp8_block", 2880, 1856, DEEPSEEK_V4, bias=False)),
}
RUNS = [
    pytest.param(executor, case, id=f"{executor}-{case}")
    for executor, cases in {"humming": list(CASES), "cutlass_mxfp4": ["gpt_oss", "deepseek_v4", "mxfp4_odd"]}.items()
    for case in cases
]


def dense_experts(config, seed=0):
    """gate != up: up is three times larger; expert e is scaled by 1 + e / 4; large enough to meet the clamp."""
    generator = torch.Generator(device=CUDA).manual_seed(seed)
    E, H, I, parts = config.num_experts, config.hidden_size, config.intermediate_size, config.activation.parts
    random = lambda *shape: torch.randn(*shape, generator=generator, device=CUDA)  # noqa: E731
    scale = 1 + torch.arange(E, device=CUDA)[:, None, None] / 4
    gate_up, down = random(E, parts * I, H) * 2 * H**-0.5, random(E, H, I) * I**-0.5 * scale
    gate_up[:, (parts - 1) * I :] *= 3
    bias = (random(E, parts * I), random(E, H) * scale[:, 0]) if config.bias else (None, None)
    return gate_up, down, *bias


def all_experts(config, seed=0):
    gate_up, down, gate_up_bias, down_bias = dense_experts(config, seed)
    parts, form = config.activation.parts, config.weight_format
    return ExpertWeights(encode(form, gate_up, parts), encode(form, down, 1), gate_up_bias, down_bias)


def make_tokens(config, num_rows, seed=1, every_row_read=True, dtype=torch.bfloat16):
    """Distinct experts; every fifth row has none, every third misses one slot; what may be garbage is NaN."""
    generator = torch.Generator(device=CUDA).manual_seed(seed)
    E, K = config.num_experts, config.top_k
    hidden = torch.randn(num_rows, config.hidden_size, generator=generator, device=CUDA)
    ids = torch.rand(num_rows, E, generator=generator, device=CUDA).argsort(1)[:, :K].to(torch.int32)
    weights = torch.rand(num_rows, K, generator=generator, device=CUDA) + 0.25
    ids[2::3, -1] = E
    ids[4::5] = E
    weights[ids == E] = float("nan")
    hidden[4::5] = float("nan")
    return FlatTokens(Payload.plain(hidden.to(dtype)), ids, weights, E, every_row_read)


def reference(config, weights, tokens, shard=None):
    shard = shard or shard_of(config)
    runner = ReferenceExecutor(config, shard, cut(weights, config, shard), CUDA, RUNTIME)
    return runner(replace(tokens, hidden=Payload.plain(tokens.hidden.data.float())))


def build(executor, config, weights, shard=None, runtime=RUNTIME):
    shard = shard or shard_of(config)
    return make_executor(executor, config, shard, cut(weights, config, shard), CUDA, runtime)


@pytest.mark.parametrize(("executor", "case"), RUNS)
def test_equals_the_reference(executor, case):
    _, config = CASES[case]
    weights = all_experts(config)
    runner = build(executor, config, weights)
    for num_rows in (0, 1, 3, 64, 1000):
        tokens = make_tokens(config, num_rows)
        out = torch.full((num_rows, config.hidden_size), float("nan"), dtype=torch.bfloat16, device=CUDA)
        assert runner(tokens, out) is out
        if num_rows:
            expected = reference(config, weights, tokens)
            assert relative_error(out, expected) <= BOUND, num_rows
            assert torch.equal(out[4::5], torch.zeros_like(out[4::5]))


@pytest.mark.parametrize("executor", ["humming", "cutlass_mxfp4"])
@pytest.mark.parametrize("moe_tp_size", [1, 2])
@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_shares_add_up_to_the_layer(executor, ep_size, moe_tp_size):
    config = layer("mxfp4", 2880, 192)
    weights, tokens = all_experts(config), make_tokens(config, 64)
    placement = ExpertPlacement(config.num_experts, ParallelConfig(ep_size * moe_tp_size, moe_tp_size=moe_tp_size))
    total = torch.zeros(64, config.hidden_size, device=CUDA)
    for rank in range(ep_size * moe_tp_size):
        total += build(executor, config, weights, placement.shard(rank))(tokens).float()
    assert relative_error(total, reference(config, weights, tokens)) <= BOUND


@pytest.mark.parametrize("executor", ["humming", "cutlass_mxfp4"])
def test_rows_of_other_ranks(executor):
    """Rows with nothing local: zeros if they are read, else whatever the executor likes, but never a wrong row."""
    config = layer("mxfp4", 96, 96)
    weights, shard = all_experts(config), ExpertPlacement(8, ParallelConfig(4)).shard(2)
    runner = build(executor, config, weights, shard)
    tokens = make_tokens(config, 64)
    local = ((tokens.ids >= shard.first_expert) & (tokens.ids < shard.end_expert)).any(1)
    assert 0 < int(local.sum()) < 64
    expected = reference(config, weights, tokens, shard)
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


@pytest.mark.parametrize("case", ["gpt_oss", "nvfp4", "fp8_block_40"])
def test_expert_major(case):
    """Slabs with empty experts; rows past the counts are NaN and infinity."""
    _, config = CASES[case]
    weights, shard = all_experts(config), shard_of(config)
    flat = make_tokens(config, 50)
    flat = replace(flat, ids=torch.where(flat.ids == 3, config.num_experts, flat.ids))
    slabs, _ = expert_major_from_flat(flat, shard, 60)
    data = slabs.hidden.data.clone()
    past = torch.arange(60, device=CUDA)[None] >= slabs.counts[:, None]
    data[past] = float("nan")
    slabs = replace(slabs, hidden=Payload.plain(data))
    expected = ReferenceExecutor(config, shard, weights, CUDA, RUNTIME)(slabs)
    for out in (build("humming", config, weights)(slabs), _adapted("humming", config, weights)(slabs)):
        assert relative_error(out[~past], expected[~past]) <= BOUND


def _adapted(executor, config, weights):
    """Forces the other format through the adapter."""
    adapted = AdaptedExecutor(build(executor, config, weights))
    adapted.native_formats = ("flat",)
    return adapted


def test_cutlass_takes_slabs_through_the_adapter():
    _, config = CASES["gpt_oss"]
    weights, shard = all_experts(config), shard_of(config)
    slabs, _ = expert_major_from_flat(make_tokens(config, 20), shard, 30)
    expected = ReferenceExecutor(config, shard, weights, CUDA, RUNTIME)(slabs)
    out = AdaptedExecutor(build("cutlass_mxfp4", config, weights))(slabs)
    valid = torch.arange(30, device=CUDA)[None] < slabs.counts[:, None]
    assert relative_error(out[valid], expected[valid]) <= BOUND


@pytest.mark.parametrize("payload", ["f32", "fp8_block", "nvfp4"])
@pytest.mark.parametrize("executor", ["humming", "cutlass_mxfp4"])
def test_other_payloads(executor, payload):
    config = layer("mxfp4", 96, 96)
    weights, tokens = all_experts(config), make_tokens(config, 32)
    hidden = torch.nan_to_num(tokens.hidden.data.float())
    tokens = replace(tokens, hidden=encode_payload(hidden, payload))
    expected = ReferenceExecutor(config, shard_of(config), weights, CUDA, RUNTIME)(tokens)
    out = build(executor, config, weights)(tokens)
    assert out.dtype == (torch.float32 if payload == "f32" else torch.bfloat16)
    assert relative_error(out, expected) <= BOUND


@pytest.mark.parametrize("case", ["gpt_oss", "mxfp4_relu2", "fp8_tensor_40", "fp8_block"])
def test_fp8_activations_are_within_their_bound(case):
    _, config = CASES[case]
    weights, tokens = all_experts(config), make_tokens(config, 64)
    runner = build("humming", config, weights, runtime=RuntimeConfig(low_precision_activations=True))
    found = relative_error(runner(tokens), reference(config, weights, tokens))
    assert BOUND / 10 < found <= FP8_BOUND
    shard = shard_of(config)
    slabs, _ = expert_major_from_flat(replace(tokens, hidden=Payload.plain(tokens.hidden.data.nan_to_num())), shard, 64)
    expected = ReferenceExecutor(config, shard, weights, CUDA, RUNTIME)(slabs)
    valid = torch.arange(64, device=CUDA)[None] < slabs.counts[:, None]
    assert relative_error(runner(slabs)[valid], expected[valid]) <= FP8_BOUND


@pytest.mark.parametrize("executor", ["humming", "cutlass_mxfp4"])
def test_deterministic_repeats_bit_for_bit(executor):
    config = layer("mxfp4", 2880, 192)
    weights, tokens = all_experts(config), make_tokens(config, 200)
    runner = build(executor, config, weights, runtime=RuntimeConfig(deterministic=True))
    first = runner(tokens)
    assert relative_error(first, reference(config, weights, tokens)) <= BOUND
    assert all(torch.equal(first, runner(tokens)) for _ in range(5))


def _swapped(weights, parts):
    half = weights.gate_up.shape[1] // 2
    bias = None if weights.gate_up_bias is None else weights.gate_up_bias.roll(half, 1)
    roll = {name: t.roll(half if name != "global_scale" else 1, 1) for name, t in weights.gate_up.tensors().items()}
    return replace(weights, gate_up=replace(weights.gate_up, **roll), gate_up_bias=bias)


@pytest.mark.parametrize("executor", ["humming", "cutlass_mxfp4"])
def test_swapped_halves_would_be_seen(executor):
    config = layer("mxfp4", 96, 96)
    weights, tokens = all_experts(config), make_tokens(config, 64)
    out = build(executor, config, _swapped(weights, 2))(tokens)
    assert relative_error(out, reference(config, weights, tokens)) > 0.1


@pytest.mark.parametrize("executor", ["humming", "cutlass_mxfp4"])
def test_padding_after_concatenation_would_be_seen(executor, monkeypatch):
    from eprt.experts import cutlass_mxfp4
    from eprt.experts.padding import pad_parts

    def wrong(stack, parts, rows, cols=None, *, reverse=False):
        if reverse:
            stack = stack.roll(stack.shape[1] // 2, 1)
        return pad_parts(stack, 1, parts * rows, cols)

    config = layer("mxfp4", 96, 96)
    weights, tokens = all_experts(config), make_tokens(config, 64)
    monkeypatch.setattr(humming_gemm, "pad_parts", wrong)
    monkeypatch.setattr(cutlass_mxfp4, "pad_parts", wrong)
    assert relative_error(build(executor, config, weights)(tokens), reference(config, weights, tokens)) > 0.1


@pytest.mark.parametrize("weight_format", ["nvfp4", "fp8_tensor"])
def test_gate_scale_used_for_up_would_be_seen(weight_format):
    config = layer(weight_format, 96, 48)
    weights, tokens = all_experts(config), make_tokens(config, 64)
    name = "global_scale" if weight_format == "nvfp4" else "scale"
    scale = getattr(weights.gate_up, name)
    assert (scale[:, 0] != scale[:, 1]).all()
    wrong = replace(weights, gate_up=replace(weights.gate_up, **{name: scale[:, :1].expand(-1, 2).contiguous()}))
    assert relative_error(build("humming", config, wrong)(tokens), reference(config, weights, tokens)) > 0.1


@pytest.mark.parametrize("executor", ["humming", "cutlass_mxfp4"])
@pytest.mark.parametrize("bare", [False, True], ids=["eprt", "by_hand"])
def test_graph_replays_with_other_counts(executor, bare):
    """Captured once; replayed with other routing, one expert alone, and no token at all. So is the bench's peer."""
    config = layer("mxfp4", 2880, 192)
    weights, shard = all_experts(config), ExpertPlacement(8, ParallelConfig(2)).shard(1)
    runner = build(executor, config, weights, shard)
    static = make_tokens(config, 64)
    out = torch.empty(64, 2880, dtype=torch.bfloat16, device=CUDA)
    peer = baselines().direct_call(runner, static)
    assert peer is not None
    call = (lambda: out.copy_(peer())) if bare else (lambda: runner(static, out))
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for seed in range(5):
        fresh = make_tokens(config, 64, seed=seed)
        if seed == 3:
            fresh = replace(fresh, ids=torch.where(fresh.ids == 5, 5, 8).to(torch.int32))
        if seed == 4:
            fresh = replace(fresh, ids=torch.full_like(fresh.ids, 8))
        static.hidden.data.copy_(fresh.hidden.data)
        static.ids.copy_(fresh.ids)
        static.weights.copy_(fresh.weights)
        out.fill_(float("nan"))
        graph.replay()
        if seed == 4:
            assert not out.any()
        else:
            assert relative_error(out, reference(config, weights, fresh, shard)) <= BOUND, seed


@pytest.mark.parametrize("source", ["cpu", "cuda"])
@pytest.mark.parametrize("executor", ["humming", "cutlass_mxfp4"])
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


@pytest.mark.parametrize("executor", ["humming", "cutlass_mxfp4"])
def test_results_stay_after_a_warmup(executor):
    config = layer("mxfp4", 96, 96)
    weights, tokens = all_experts(config), make_tokens(config, 4)
    runner = build(executor, config, weights)
    runner.warmup(4)
    assert relative_error(runner(tokens), reference(config, weights, tokens)) <= BOUND
