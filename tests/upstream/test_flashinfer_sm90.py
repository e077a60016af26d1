"""What cutlass_mxfp4 takes from the installed FlashInfer. No GPU is needed.

The executor itself runs on the CPU in front of a stand-in that accepts only what the real entry point accepts and
computes what FlashInfer's source says the kernel computes, written here from that source.
"""

from __future__ import annotations

import inspect
import re
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from support.cases import expert_cases as cases
from support.libraries import Later, folder, needs

from eprt.bench.baselines import baselines
from eprt.config import ParallelConfig, RuntimeConfig
from eprt.conformance.oracle import relative_error
from eprt.errors import ConfigError
from eprt.experts import executor_spec, make_executor
from eprt.experts.base import AdaptedExecutor
from eprt.experts.reference import decode_matrix
from eprt.placement import ExpertPlacement
from eprt.weights import MX_BLOCK, Mxfp4

pytestmark = needs("flashinfer")
fused_moe, autotuner = Later("flashinfer.fused_moe"), Later("flashinfer.autotuner")
SOURCE = folder("flashinfer") / "data/csrc/fused_moe/cutlass_backend"
FP8 = RuntimeConfig(low_precision_activations=True)


class StandIn:
    """`cutlass_fused_moe` in torch: [up; gate] split in the middle, ids of other ranks skipped, every row written."""

    def __init__(self, real) -> None:
        self.__signature__ = inspect.signature(real)
        self.calls = []

    def __call__(self, *args, **keywords):
        bound = self.__signature__.bind(*args, **keywords)
        bound.apply_defaults()
        self.calls.append(given := bound.arguments)
        assert given["input"].shape[0] > 0
        assert given["input"].dtype == given["output_dtype"] == given["output"].dtype == torch.bfloat16
        assert given["token_selected_experts"].dtype == torch.int32
        assert given["token_final_scales"].dtype == torch.float32
        assert (given["tp_size"], given["tp_rank"], given["enable_alltoall"]) == (1, 0, False)
        assert given["use_w4_group_scaling"]
        w1, w2 = given["fc1_expert_weights"], given["fc2_expert_weights"]
        L, H, half = w2.shape
        assert w1.shape == (L, 4 * half, H // 2)
        assert H % 128 == 0
        assert half % 64 == 0
        scales = given["quant_scales"]
        assert len(scales) == (5 if given["use_wfp4afp8_humming"] else 2)
        first_scale, second_scale = scales[0], scales[len(scales) // 2 + 1 if len(scales) == 5 else 1]
        assert first_scale.dtype == second_scale.dtype == torch.int32
        up_gate = decode_matrix(Mxfp4(w1, first_scale.view(torch.uint8)), 2)
        down = decode_matrix(Mxfp4(w2, second_scale.view(torch.uint8)), 1)
        parameters = [given[f"swiglu_{name}"] for name in ("alpha", "beta", "limit")]
        assert len({value is None for value in parameters}) == 1, "all three or none"
        x, out = given["input"].float(), torch.zeros_like(given["output"], dtype=torch.float32)
        for slot, expert in enumerate((given["token_selected_experts"] - given["ep_rank"] * L).T):
            for e in range(L):
                rows = expert == e
                alpha, beta, limit = (1.0, 0.0, 1e30) if parameters[0] is None else [v[e].item() for v in parameters]
                hidden = x[rows] @ up_gate[e].T
                if given["fc1_expert_biases"] is not None:
                    hidden = hidden + given["fc1_expert_biases"][e].float()
                up, gate = hidden.chunk(2, dim=1)
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                y = gate * torch.sigmoid(alpha * gate) * (up + beta) @ down[e].T
                if given["fc2_expert_biases"] is not None:
                    y = y + given["fc2_expert_biases"][e].float()
                out[rows] += given["token_final_scales"][rows, slot, None] * y
        given["output"].copy_(out)
        return given["output"]


@pytest.fixture
def kernel(monkeypatch):
    """FlashInfer with the CUDA parts replaced; every replaced call must fit the real signature."""
    stand_in = StandIn(fused_moe.cutlass_fused_moe)

    def checked(name, result):
        signature = inspect.signature(getattr(fused_moe, name))

        def call(*args, **keywords):
            return result(*signature.bind(*args, **keywords).args)

        monkeypatch.setattr(f"flashinfer.fused_moe.{name}", call)

    checked("cutlass_fused_moe_workspace_size", lambda *_: 256)
    checked("interleave_moe_weights_for_sm90_mixed_gemm", lambda weight, kind="": weight if kind == "fp4" else None)
    checked("interleave_moe_scales_for_sm90_mixed_gemm", lambda scales, size=0: scales if size == MX_BLOCK else None)
    residual = torch.ones(1) / 64
    checked("preprocess_moe_weights_for_sm90_mixed_gemm_humming", lambda codes, scales: (codes, scales, residual))
    monkeypatch.setattr("flashinfer.fused_moe.cutlass_fused_moe", stand_in)
    return stand_in


def mxfp4_layer(**changes):
    return cases.make_config("mxfp4", activation=cases.GPT_OSS, bias=True, num_experts=8, top_k=3, **changes)


def finite(flat):
    """The same rows, all of them read, without NaN."""
    hidden = replace(flat.hidden, data=flat.hidden.data.nan_to_num())
    return replace(flat, hidden=hidden, weights=flat.weights.nan_to_num(), every_row_read=True)


def run(config, weights, tokens, parallel=None, rank=0, runtime=cases.RUNTIME):
    shard = ExpertPlacement(config.num_experts, parallel or ParallelConfig()).shard(rank)
    return cases.built("cutlass_mxfp4", config, weights, shard, runtime)(tokens), shard


@pytest.mark.parametrize(
    "config",
    [
        mxfp4_layer(),
        mxfp4_layer(intermediate_size=160),
        cases.make_config("mxfp4", activation=cases.DEEPSEEK_V4, hidden_size=128, intermediate_size=128),
        cases.make_config("mxfp4"),
    ],
    ids=["gpt_oss", "odd", "deepseek_v4_aligned", "silu"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_executor_in_front_of_the_stand_in(kernel, config, dtype):
    weights = cases.make_weights(config)
    flat = finite(cases.make_flat(config, dtype=dtype))
    out, shard = run(config, weights, flat)
    expected = cases.built("reference", config, weights, shard)(flat)
    assert out.dtype == dtype
    assert relative_error(out, expected) < 1e-2
    assert len(kernel.calls) == 1
    aligned = config.hidden_size % 128 == 0 and dtype == torch.bfloat16
    assert (kernel.calls[0]["output"].data_ptr() == out.data_ptr()) == aligned


@pytest.mark.parametrize("H", [96, 128])
@pytest.mark.parametrize("rank", [0, 3])
def test_by_hand_is_the_same_job_around_the_same_call(kernel, rank, H):
    """Padded and cut where the kernel's tiles ask for it; ids of other ranks and of nobody."""
    config = mxfp4_layer(hidden_size=H)
    shard = cases.shard_of(config, rank, 4)
    flat = replace(cases.make_flat(config, 40, dtype=torch.bfloat16), every_row_read=True)
    runner = cases.built("cutlass_mxfp4", config, cases.make_weights(config), shard)
    expected, found = runner(flat), baselines().direct_call(runner, flat)()
    ours, theirs = kernel.calls
    assert (found.dtype, found.shape, found.is_contiguous()) == (torch.bfloat16, (40, H), True)
    baselines().check_direct(found, expected)
    for name, value in ours.items():
        if not torch.is_tensor(value):
            assert value is theirs[name] or value == theirs[name], name
        elif name not in ("output", "workspace_buffer"):
            assert torch.equal(value.nan_to_num(), theirs[name].nan_to_num()), name


@pytest.mark.parametrize("moe_tp_size", [1, 2])
@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_shares_add_up(kernel, ep_size, moe_tp_size):
    config = mxfp4_layer()
    weights = cases.make_weights(config)
    flat = finite(cases.make_flat(config, dtype=torch.bfloat16))
    parallel = ParallelConfig(ep_size * moe_tp_size, moe_tp_size=moe_tp_size)
    total = sum(run(config, weights, flat, parallel, rank)[0].float() for rank in range(parallel.world_size))
    assert relative_error(total, cases.built("reference", config, weights)(flat)) < 1e-2
    assert {call["ep_size"] for call in kernel.calls} == {ep_size}
    assert {call["ep_rank"] for call in kernel.calls} == set(range(ep_size))


def test_slabs_go_through_the_adapter_and_zero_rows_nowhere(kernel):
    config = mxfp4_layer()
    weights = cases.make_weights(config)
    runner = AdaptedExecutor(cases.built("cutlass_mxfp4", config, weights))
    flat = cases.make_flat(config, dtype=torch.bfloat16)
    slabs = cases.make_expert_major(flat, cases.shard_of(config))
    valid = cases.valid_rows(slabs)
    slabs = replace(slabs, hidden=replace(slabs.hidden, data=slabs.hidden.data.nan_to_num(0, 0, 0)))
    expected = cases.built("reference", config, weights)(slabs)
    assert relative_error(runner(slabs)[valid], expected[valid]) < 1e-2
    called = len(kernel.calls)
    assert runner(cases.make_flat(config, 0, dtype=torch.bfloat16)).shape == (0, 96)
    assert len(kernel.calls) == called


def test_runtime_choices_reach_the_kernel(kernel):
    config = mxfp4_layer()
    weights, flat = cases.make_weights(config), cases.make_flat(config, dtype=torch.bfloat16)
    flat = replace(flat, weights=flat.weights.nan_to_num())
    run(config, weights, flat)
    run(config, weights, flat, runtime=RuntimeConfig(deterministic=True))
    run(config, weights, flat, runtime=FP8)
    assert [call["use_fused_finalize"] for call in kernel.calls] == [True, False, True]
    assert [call["use_wfp4afp8_humming"] for call in kernel.calls] == [False, False, True]
    scales = kernel.calls[2]["quant_scales"]
    assert scales[1].tolist() == scales[4].tolist() == [1.0] * 8  # residual times FlashInfer's fixed 2 ** 6
    assert scales[2].shape == ()
    assert all(call["workspace_buffer"].numel() == 256 for call in kernel.calls)


def test_warmup_and_workspace_have_the_top_k_of_the_tokens(kernel, monkeypatch):
    """A dispatcher may pad top-k: the workspace holds rows * top-k, and FlashInfer tunes for such tokens."""
    sized, tuned = [], []

    def size(rows, hidden, intermediate, num_experts, top_k, **_):
        sized.append((rows, top_k))
        return 256

    @contextmanager
    def autotune(tune_mode):
        assert tune_mode
        before = len(kernel.calls)
        yield
        tuned.extend((len(call["input"]), call["tune_max_num_tokens"]) for call in kernel.calls[before:])

    monkeypatch.setattr("flashinfer.fused_moe.cutlass_fused_moe_workspace_size", size)
    monkeypatch.setattr("flashinfer.autotuner.autotune", autotune)
    config = mxfp4_layer()
    weights, flat = cases.make_weights(config), cases.make_flat(config, dtype=torch.bfloat16)
    runner = cases.built("cutlass_mxfp4", config, weights)
    runner.warmup(13, top_k=4)
    assert tuned == [(13, 16)]
    assert {call["token_selected_experts"].shape[1] for call in kernel.calls} == {4}
    assert {top_k for _, top_k in sized} == {4}
    ids = torch.nn.functional.pad(flat.ids, (0, 1), value=8)
    wide = replace(flat, ids=ids, weights=torch.nn.functional.pad(flat.weights.nan_to_num(), (0, 1)))
    wide = replace(wide, hidden=replace(flat.hidden, data=flat.hidden.data.nan_to_num()), every_row_read=True)
    expected = cases.built("reference", config, weights)(wide)
    assert relative_error(runner(wide), expected) < 1e-2
    assert sized[-1][1] == 4
    kernel.calls.clear()
    AdaptedExecutor(cases.built("cutlass_mxfp4", config, weights)).warmup(2)
    assert {call["token_selected_experts"].shape[1] for call in kernel.calls} == {1}
    assert max(len(call["token_selected_experts"]) for call in kernel.calls) >= 2 * 8


def test_an_older_library_is_refused_by_name(kernel, monkeypatch):
    names = [
        p for n, p in kernel.__signature__.parameters.items() if n not in ("use_wfp4afp8_humming", "workspace_buffer")
    ]
    kernel.__signature__ = inspect.Signature(names)
    config = mxfp4_layer()
    weights, flat = cases.make_weights(config), cases.make_flat(config, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="MXFP4 x FP8"):
        run(config, weights, flat, runtime=FP8)


def test_uneven_share_is_refused(kernel):
    config = mxfp4_layer()
    shard = replace(ExpertPlacement(8, ParallelConfig(4)).shard(1), first_expert=3)
    weights = cases.make_weights(config).map(lambda tensor: tensor[3:5])
    with pytest.raises(ConfigError, match="contiguous equal shares"):
        make_executor("cutlass_mxfp4", config, shard, weights, cases.CPU, cases.RUNTIME)


def test_installed_version_is_new_enough():
    assert executor_spec("cutlass_mxfp4").requirement.check()


def test_scale_interleave_is_a_permutation():
    """The library's own, on the CPU: every byte of the padded scales is kept, in its 64 x 128 block."""
    scales = torch.arange(256 * 8, dtype=torch.int64).remainder(251).to(torch.uint8).view(1, 256, 8)
    folded = fused_moe.interleave_moe_scales_for_sm90_mixed_gemm(scales, group_size=MX_BLOCK)
    assert folded.shape == (1, 4, 2, 16, 16)
    assert folded.is_contiguous()
    for i in range(4):
        for j in range(2):
            block = scales[0, 64 * i : 64 * (i + 1), 4 * j : 4 * (j + 1)]
            assert torch.equal(folded[0, i, j].flatten().sort().values, block.flatten().sort().values)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        # Ids of other ranks, and E, are nobody's.
        ("cutlass_fused_moe_kernels.cuh", "bool is_valid_expert = expert >= start_expert && expert < end_expert;"),
        # Without enable_alltoall rows with nothing local are zeroed.
        ("cutlass_fused_moe_kernels.cuh", "finalizeMoeRouting must fill invalid output tokens with"),
        # Which is why MoE-TP isn't told to it.
        ("cutlass_fused_moe_kernels.cuh", "bool const is_rank_0 = parallelism_config.tp_rank == 0;"),
        # Experts in all follow from ep_size, so ep_size must be the true one.
        (
            "flashinfer_cutlass_fused_moe_binding.cu",
            "auto const num_experts_total = static_cast<int>(num_experts_on_rank * ep_size);",
        ),
        # alpha, beta, limit: the clamped activation.
        ("cutlass_fused_moe_kernels.cuh", "return gate_clamped * fn(gate_clamped * alpha) * (linear_clamped + beta);"),
    ],
)
def test_the_source_still_says_so(file, text):
    source = SOURCE / file
    if not source.exists():
        pytest.skip(f"this wheel doesn't carry {source}")
    flat = re.sub(r"\s*//\s*|\s+", " ", source.read_text())
    assert re.sub(r"\s+", " ", text) in flat
