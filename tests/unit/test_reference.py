"""The witness itself: against numbers worked out by hand, the formats' bytes, and transformers' own experts."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace

import pytest
import torch
from support.cases import expert_cases as cases

from eprt import quant
from eprt.config import Activation, MoEConfig
from eprt.conformance.oracle import relative_error, shard_weights
from eprt.errors import ConfigError, InputError
from eprt.experts.reference import ReferenceExecutor, decode_hidden, decode_matrix, expert_forward
from eprt.tokens import ExpertMajorTokens, FlatTokens, Payload
from eprt.weights import Dense, ExpertWeights, Fp8Block, Fp8Channel, Fp8Tensor, Int4, Mxfp4, Mxfp8, Nvfp4

# Two float32 computations of the same sums of up to 96 products, added in another order: 2 ** -24 * sqrt(96) with
# room. A wrong layout or a dropped bias is 0.1 or more (the mutation tests below).
F32_TOLERANCE = 1e-5


def build(config: MoEConfig, weights: ExpertWeights, **where) -> ReferenceExecutor:
    return ReferenceExecutor(config, cases.shard_of(config, **where), weights, cases.CPU, cases.RUNTIME)


def random_matrix(name: str, L: int, rows: int, cols: int, parts: int):
    generator = torch.Generator().manual_seed(7)

    def bytes_(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    def floats(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator) + 0.5

    grid = (parts * -(-(rows // parts) // 128), -(-cols // 128))
    e4m3 = torch.float8_e4m3fn
    return {
        "mxfp4": lambda: Mxfp4(bytes_(L, rows, cols // 2), bytes_(L, rows, cols // 32)),
        "mxfp8": lambda: Mxfp8(bytes_(L, rows, cols).view(e4m3), bytes_(L, rows, cols // 32)),
        "nvfp4": lambda: Nvfp4(bytes_(L, rows, cols // 2), bytes_(L, rows, cols // 16).view(e4m3), floats(L, parts)),
        "fp8_tensor": lambda: Fp8Tensor(bytes_(L, rows, cols).view(e4m3), floats(L, parts)),
        "fp8_block": lambda: Fp8Block(bytes_(L, rows, cols).view(e4m3), floats(L, *grid)),
        "fp8_channel": lambda: Fp8Channel(bytes_(L, rows, cols).view(e4m3), floats(L, rows)),
        "int4": lambda: Int4(bytes_(L, rows, cols // 2), floats(L, rows, cols // 32).bfloat16()),
        "int4_zeros": lambda: Int4(bytes_(L, rows, cols // 2), floats(L, rows, 1), bytes_(L, rows, 1) % 16),
        "bf16": lambda: Dense(floats(L, rows, cols).bfloat16()),
    }[name]()


@pytest.mark.parametrize(
    "name", ["mxfp4", "mxfp8", "nvfp4", "fp8_tensor", "fp8_block", "fp8_channel", "int4", "int4_zeros", "bf16"]
)
@pytest.mark.parametrize(("rows", "cols", "parts"), [(8, 64, 2), (300, 160, 2), (256, 256, 1), (6, 32, 1)])
def test_two_decoders_agree_on_any_bytes(name: str, rows: int, cols: int, parts: int):
    """Every byte pattern, NaN and extreme scales included. 1e-6: the order of two multiplications may differ."""
    matrix = random_matrix(name, 2, rows, cols, parts)
    matrix.check("w", 2, rows, cols, parts)
    torch.testing.assert_close(
        decode_matrix(matrix, parts), quant.decode(matrix, parts), rtol=1e-6, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("name", ["fp8_block", "nvfp4", "bf16", "f32"])
@pytest.mark.parametrize("H", [96, 128, 304])
def test_hidden_decoders_agree(name: str, H: int):
    payload = quant.encode_payload(torch.randn(5, H), name)
    assert torch.equal(decode_hidden(payload).to(quant.decode_payload(payload).dtype), quant.decode_payload(payload))


def one_expert(activation, x: list[float], bias: bool = False) -> list[float]:
    """Gate row [1, 0], up row [0, 1] (relu2: up row [1, 0]), down rows 2 and 3; biases 0.5 and 0.25 | 10 and 20."""
    config = MoEConfig(1, 1, 2, 1, activation=activation, bias=bias, weight_format="f32")
    gate_up = torch.eye(2)[: activation.parts]
    biases = (torch.tensor([0.5, 0.25])[: activation.parts], torch.tensor([10.0, 20.0])) if bias else (None, None)
    return expert_forward(config, gate_up, torch.tensor([[2.0], [3.0]]), *biases, torch.tensor([x]))[0].tolist()


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("activation", "x", "bias", "inner"),
    [
        (cases.SILU, [1.0, 2.0], False, 0.7310585786300049 * 2),
        (cases.SILU, [100.0, -9.0], False, 100.0 * -9),
        (cases.GPT_OSS, [1.0, 2.0], False, sigmoid(1.702) * 3),
        (cases.GPT_OSS, [10.0, 9.0], False, 7 * sigmoid(7 * 1.702) * 8),  # both clamped at 7, then up + 1
        (cases.GPT_OSS, [-10.0, -9.0], False, -10 * sigmoid(-17.02) * -6),  # gate has no lower clamp
        (cases.GPT_OSS, [1.0, 2.0], True, 1.5 * sigmoid(1.5 * 1.702) * 3.25),
        (cases.DEEPSEEK_V4, [20.0, -30.0], False, 10 * sigmoid(10) * -10),
        (Activation("geglu"), [1.0, 2.0], False, 0.8411919906 * 2),
        (Activation("geglu"), [-0.5, 3.0], False, -0.1542859644 * 3),
        (cases.RELU2, [3.0, 5.0], False, 9.0),
        (cases.RELU2, [-3.0, 5.0], False, 0.0),
        (cases.RELU2, [3.0, 5.0], True, 3.5**2),
    ],
)
def test_expert_by_hand(activation, x: list[float], bias: bool, inner: float):
    expected = [2 * inner + 10 * bias, 3 * inner + 20 * bias]
    assert one_expert(activation, x, bias) == pytest.approx(expected, rel=1e-6)


def halves(tensor: torch.Tensor) -> torch.Tensor:
    """g0, u0, g1, u1, ... along the last dimension -> all g, all u."""
    return torch.cat((tensor[..., 0::2], tensor[..., 1::2]), dim=-1)


def canonical(module) -> ExpertWeights:
    """The weights of transformers' experts: transposed and taking turns in gpt-oss, without a gate in Nemotron-H."""
    if hasattr(module, "gate_up_proj_bias"):
        gate_up, down = halves(module.gate_up_proj).mT.contiguous(), module.down_proj.mT.contiguous()
        return ExpertWeights(Dense(gate_up), Dense(down), halves(module.gate_up_proj_bias), module.down_proj_bias.data)
    gate_up = module.gate_up_proj if hasattr(module, "gate_up_proj") else module.up_proj
    return ExpertWeights(Dense(gate_up.data), Dense(module.down_proj.data))


# transformers' module, prefix of its classes, activation, the config's names of E, H and I
EXPERTS = {
    "gpt_oss": ("GptOss", cases.GPT_OSS, ("num_local_experts", "hidden_size", "intermediate_size")),
    "qwen3_moe": ("Qwen3Moe", cases.SILU, ("num_experts", "hidden_size", "moe_intermediate_size")),
    "deepseek_v3": ("DeepseekV3", cases.SILU, ("n_routed_experts", "hidden_size", "moe_intermediate_size")),
    "deepseek_v4": ("DeepseekV4", cases.DEEPSEEK_V4, ("n_routed_experts", "hidden_size", "moe_intermediate_size")),
    "nemotron_h": ("NemotronH", cases.RELU2, ("n_routed_experts", "moe_latent_size", "moe_intermediate_size")),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_equals_transformers_experts(name: str):
    pytest.importorskip("transformers")
    E, H, I, T, K = 4, 48, 40, 17, 2
    prefix, activation, sizes = EXPERTS[name]
    models = f"transformers.models.{name}"
    hf_config = getattr(importlib.import_module(f"{models}.configuration_{name}"), f"{prefix}Config")(
        **dict(zip(sizes, (E, H, I), strict=True))
    )
    kind = getattr(importlib.import_module(f"{models}.modeling_{name}"), f"{prefix}Experts")
    hf_config._experts_implementation = "eager"
    module = kind(hf_config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.8)
        hidden = torch.randn(T, H, generator=generator)
        ids = torch.rand(T, E, generator=generator).argsort(1)[:, :K]
        weights = torch.rand(T, K, generator=generator)
        theirs = module(hidden, ids, weights)
        ours = canonical(module)
    config = MoEConfig(E, K, H, I, activation=activation, weight_format="f32", bias=ours.gate_up_bias is not None)
    if activation.limit is not None:
        clamped = (torch.einsum("th,erh->ter", hidden, ours.gate_up.data).abs() > activation.limit).float().mean()
        assert clamped > 0.02, "the case must reach the clamp"
    flat = FlatTokens(Payload.plain(hidden), ids.to(torch.int32), weights, E)
    assert relative_error(build(config, ours)(flat), theirs) < F32_TOLERANCE
    if activation.gated:
        assert relative_error(build(config, cases.swap_gate_and_up(ours))(flat), theirs) > 0.1
    if ours.down_bias is not None:
        unbiased = replace(ours, down_bias=torch.zeros_like(ours.down_bias))
        assert relative_error(build(config, unbiased)(flat), theirs) > 0.01


def flat_by_definition(config: MoEConfig, weights: ExpertWeights, flat: FlatTokens) -> torch.Tensor:
    """Row by row, slot by slot: sum of weight * expert(x). Rows with no valid slot are 0."""
    rows = []
    for row in range(flat.num_rows):
        total = torch.zeros(config.hidden_size)
        for slot in range(config.top_k):
            e = int(flat.ids[row, slot])
            if e == config.num_experts:
                continue
            bias = [None if b is None else b[e] for b in (weights.gate_up_bias, weights.down_bias)]
            x = flat.hidden.data[row : row + 1].float()
            y = expert_forward(config, weights.gate_up.data[e], weights.down.data[e], *bias, x)
            total += flat.weights[row, slot] * y[0]
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("activation", cases.ACTIVATIONS.values(), ids=cases.ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_flat_is_the_weighted_sum(activation, bias: bool):
    config = cases.make_config(activation=activation, bias=bias)
    weights, flat = cases.make_dense(config), cases.make_flat(config)
    expected = flat_by_definition(config, weights, flat)
    rows = cases.rows_with_expert(flat, cases.shard_of(config))
    out = torch.full((flat.num_rows, config.hidden_size), cases.NAN)
    build(config, weights)(flat, out)
    assert relative_error(out[rows], expected[rows]) < F32_TOLERANCE
    assert out[~rows].isnan().all(), "rows without a local expert are left untouched"
    out.fill_(cases.NAN)
    build(config, weights)(replace(flat, every_row_read=True), out)
    assert relative_error(out, expected) < F32_TOLERANCE
    assert (out[~rows] == 0).all()


@pytest.mark.parametrize("world_size", [1, 2])
def test_expert_major_is_each_experts_own_function(world_size: int):
    config = cases.make_config(activation=cases.GPT_OSS, bias=True)
    weights, flat = cases.make_dense(config), cases.make_flat(config)
    for rank in range(world_size):
        shard = cases.shard_of(config, rank, world_size)
        slabs = cases.make_expert_major(flat, shard)
        out = torch.full_like(slabs.hidden.data, cases.NAN)
        build(config, shard_weights(weights, config, shard), rank=rank, world_size=world_size)(slabs, out)
        assert int(slabs.counts.sum()) > 0
        for index, count in enumerate(slabs.counts.tolist()):
            e = shard.first_expert + index
            expected = expert_forward(
                config, weights.gate_up.data[e], weights.down.data[e], weights.gate_up_bias[e], weights.down_bias[e],
                slabs.hidden.data[index, :count],
            )  # fmt: skip
            torch.testing.assert_close(out[index, :count], expected, rtol=1e-5, atol=1e-5)
        assert out[~cases.valid_rows(slabs)].isnan().all(), "rows past the counts are left untouched"


@pytest.mark.parametrize("name", ["fp8_block", "nvfp4"])
def test_packed_tokens_give_bf16_of_the_decoded_tokens(name: str):
    config = cases.make_config()
    weights, flat = cases.make_dense(config), cases.make_flat(config)
    payload = quant.encode_payload(flat.hidden.data.nan_to_num(), name)
    packed = build(config, weights)(replace(flat, hidden=payload, every_row_read=True))
    plain = build(config, weights)(replace(flat, hidden=Payload.plain(decode_hidden(payload)), every_row_read=True))
    assert packed.dtype == torch.bfloat16
    assert torch.equal(packed, plain.bfloat16())


@pytest.mark.parametrize("M", [0, 3])
def test_zero_rows(M: int):
    config = cases.make_config()
    executor = build(config, cases.make_dense(config))
    assert executor(cases.make_flat(config, 0)).shape == (0, 96)
    slabs = ExpertMajorTokens(Payload.plain(torch.full((4, M, 96), cases.NAN)), torch.zeros(4, dtype=torch.int32))
    assert executor(slabs).shape == (4, M, 96)


def test_refusals():
    config = cases.make_config()
    executor = build(config, cases.make_dense(config))
    flat = cases.make_flat(config)
    with pytest.raises(InputError, match="hidden size 32"):
        executor(replace(flat, hidden=Payload.plain(torch.zeros(13, 32))))
    with pytest.raises(InputError, match="out is"):
        executor(flat, torch.empty(13, 96, dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match="gate_up_bias is missing"):
        build(replace(config, bias=True), cases.make_dense(config))
