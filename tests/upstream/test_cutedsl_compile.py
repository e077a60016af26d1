"""Every CuteDSL kernel that the executor reaches compiles for sm_100a, without a GPU, through FlashInfer's own code and
the arguments that the executor really passes.

The tensors are CPU tensors that say they are on a GPU; the CUDA runtime's few answers are B200's; routing and the
launches are left out. `cute.compile` is the real one, and what it made is inspected.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.libraries import needs
from torch.overrides import TorchFunctionMode

from eprt.config import Activation, MoEConfig, RuntimeConfig, TokenFormat
from eprt.experts.blackwell.cutedsl import CuteDslExecutor, load_kernels
from eprt.placement import ExpertShard
from eprt.tokens import ExpertMajorTokens, FlatTokens, Payload
from eprt.weights import ExpertWeights, Nvfp4

pytestmark = needs("flashinfer", "cutlass", "triton")  # FlashInfer's CuteDSL modules import Triton
B200_SMS = 148
L, ROWS = 2, 64  # local experts and rows here; both are run-time numbers to the contiguous kernels

RELU2 = Activation("relu2")
MODELS = {
    "DeepSeek-V3": MoEConfig(256, 8, 7168, 2048, weight_format="nvfp4"),
    "Qwen3.5-397B-A17B": MoEConfig(512, 10, 4096, 1024, weight_format="nvfp4"),
    "Nemotron-H": MoEConfig(128, 6, 2688, 1856, RELU2, weight_format="nvfp4"),
    "clamped": MoEConfig(128, 4, 2880, 2880, Activation(alpha=1.702, beta=1.0, limit=7.0), weight_format="nvfp4"),
}


class OnGpu(torch.Tensor):
    """A CPU tensor that passes for a CUDA one."""

    device = property(lambda self: torch.device("cuda", 0))
    is_cuda = property(lambda self: True)

    def record_stream(self, stream: Any) -> None:
        """Nothing runs."""


class MakeOnGpu(TorchFunctionMode):
    """Whatever is allocated on a device, or moved to one, becomes `OnGpu`."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        keywords = dict(kwargs or {})
        if func is torch.Tensor.to:
            args = tuple(a for a in args if not isinstance(a, torch.device))
            return func(*args, **keywords) if len(args) > 1 else args[0].clone()
        placed = keywords.pop("device", None) is not None
        out = func(*args, **keywords)
        return out.as_subclass(OnGpu) if placed and type(out) is torch.Tensor else out


@dataclass
class Compiler:
    """Stands where FlashInfer's modules have `cutlass.cute`; its compile is the real one, without the launch."""

    cute: Any
    made: list[Any] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cute, name)

    def compile(self, *args: Any, **keywords: Any) -> Any:
        self.made.append(self.cute.compile(*args, **keywords))
        return lambda *args, **keywords: None

    def check(self, kernels: int) -> None:
        """The right number of kernels, each with an ELF image for sm_100a inside."""
        assert len(self.made) == kernels
        for kernel in self.made:
            module = str(kernel.ir_module)
            assert set(re.findall(r"\bsm_\d+[a-z]*", module)) == {"sm_100a"}
            assert "\\7FELF" in module


@pytest.fixture
def compiler(monkeypatch) -> Compiler:
    """A machine with a B200 as far as FlashInfer's CuteDSL modules can see."""
    import cutlass.cute as cute
    import flashinfer.cute_dsl.utils as shared
    from flashinfer import utils
    from flashinfer.fused_moe.cute_dsl import blockscaled_contiguous_gather_grouped_gemm_act_fusion as first
    from flashinfer.fused_moe.cute_dsl import blockscaled_contiguous_grouped_gemm_finalize_fusion as second
    from flashinfer.fused_moe.cute_dsl import fused_moe, moe_utils
    from flashinfer.fused_moe.cute_dsl.blackwell import moe_finalize, moe_w4a16
    from flashinfer.gemm.kernels import grouped_gemm_masked_blackwell, grouped_gemm_masked_wrapper

    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    compiler = Compiler(cute)
    for module in (first, second, moe_finalize, moe_w4a16, grouped_gemm_masked_blackwell):
        monkeypatch.setattr(module, "cute", compiler)
    for module in (utils, first, second, grouped_gemm_masked_blackwell, grouped_gemm_masked_wrapper):
        monkeypatch.setattr(module, "get_compute_capability", lambda device: (10, 0))
    for module in (shared, first, second, moe_w4a16, grouped_gemm_masked_blackwell, grouped_gemm_masked_wrapper):
        monkeypatch.setattr(module, "get_num_sm", lambda device: B200_SMS, raising=False)
        monkeypatch.setattr(module, "get_max_active_clusters", lambda size: B200_SMS // size, raising=False)
    for module, cache in (
        (first, "_gather_kernel_cache"),
        (second, "_finalize_kernel_cache"),
        (moe_w4a16, "_kernel_cache"),
        (moe_finalize, "_kernel_cache"),
    ):
        monkeypatch.setattr(module, cache, {})
    grouped_gemm_masked_blackwell.get_cute_dsl_compiled_masked_gemm_kernel.cache_clear()

    def moe_sort(*, token_selected_experts, top_k, num_local_experts, tile_tokens_dim, **rest):
        """Buffers of the routing kernel's sizes."""
        rows = token_selected_experts.shape[0]
        tiles = moe_utils.get_max_num_tiles(rows, top_k, num_local_experts, tile_tokens_dim)
        slots = moe_utils.get_max_num_permuted_tokens(rows, top_k, num_local_experts, tile_tokens_dim)
        sizes = ((tiles,), (tiles,), (rows, top_k), (slots,), (1,), (1,))
        return tuple(torch.zeros(size, dtype=torch.int32, device="cuda") for size in sizes)

    def cuda_kernels() -> None:
        raise AssertionError("a CUDA C++ kernel was asked for: it would have to be compiled or fetched")

    monkeypatch.setattr(moe_utils, "_get_moe_utils_module", cuda_kernels)
    for module in (fused_moe, moe_w4a16):
        monkeypatch.setattr(module, "moe_sort", moe_sort)
        monkeypatch.setattr(module, "moe_output_memset_inplace", lambda output: None)
    monkeypatch.setattr(moe_w4a16, "moe_permute", lambda *args, **keywords: None)
    stream = SimpleNamespace(cuda_stream=0)
    event = SimpleNamespace(record=lambda *a: None, wait=lambda *a: None)
    for name, value in {
        "current_stream": lambda device=None: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "device": lambda device: contextlib.nullcontext(),
        "Stream": lambda **keywords: stream,
        "Event": lambda **keywords: event,
        "get_device_capability": lambda device=None: (10, 0),
        "get_device_properties": lambda d=None: SimpleNamespace(major=10, minor=0, multi_processor_count=B200_SMS),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return compiler


def kernels() -> SimpleNamespace:
    """FlashInfer's, but for the quantisers, which are CUDA C++: their outputs have the documented shapes."""

    def linear(x, multiplier, **options):
        sizes = ((x.shape[0], x.shape[1] // 2), (x.shape[0], x.shape[1] // 16))
        return tuple(torch.zeros(size, dtype=torch.uint8, device="cuda") for size in sizes)

    def masked(x, mask, multiplier, columns, nvfp4_4over6):
        codes = torch.zeros((x.shape[0], x.shape[1], columns // 2), dtype=torch.uint8, device="cuda").permute(1, 2, 0)
        row_tiles, col_tiles = -(-x.shape[1] // 128), -(-columns // 64)
        scales = torch.zeros((x.shape[0], row_tiles, col_tiles, 32, 4, 4), dtype=torch.uint8, device="cuda")
        return codes, scales.permute(3, 4, 1, 5, 2, 0)

    quantisers = dict(
        fp4_quantize=linear,
        scaled_fp4_grouped_quantize=lambda x, *rest, **options: masked(x, *rest, x.shape[2], **options),
        silu_and_mul_scaled_nvfp4_experts_quantize=lambda x, *rest, **o: masked(x, *rest, x.shape[2] // 2, **o),
    )
    return SimpleNamespace(**vars(load_kernels()) | quantisers)


def weights(config: MoEConfig, calibrated: bool = True) -> ExpertWeights:
    def matrix(rows: int, cols: int, parts: int) -> Nvfp4:
        codes = torch.zeros(L, rows, cols // 2, dtype=torch.uint8, device="cuda")
        scales = torch.zeros(L, rows, cols // 16, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
        ones = torch.ones(L, parts, device="cuda")
        return Nvfp4(codes, scales, ones, ones if calibrated else None)

    H, I, parts = config.hidden_size, config.intermediate_size, config.activation.parts
    return ExpertWeights(matrix(parts * I, H, parts), matrix(H, I, 1))


def executor(
    config: MoEConfig, token_format: TokenFormat, calibrated: bool = True, deterministic: bool = False
) -> CuteDslExecutor:
    kind = type("Built", (CuteDslExecutor,), {"kernels": kernels()})
    shard, runtime = (
        ExpertShard(config.num_experts, L, L),
        RuntimeConfig(token_format=token_format, deterministic=deterministic),
    )
    return kind(config, shard, weights(config, calibrated), torch.device("cuda"), runtime)


def flat(config: MoEConfig) -> FlatTokens:
    hidden = torch.zeros(ROWS, config.hidden_size, dtype=torch.bfloat16, device="cuda")
    ids = torch.zeros(ROWS, config.top_k, dtype=torch.int32, device="cuda")
    return FlatTokens(Payload.plain(hidden), ids, torch.zeros(ROWS, config.top_k, device="cuda"), config.num_experts)


@pytest.mark.parametrize(
    ("model", "options", "kernels"),
    [
        *((model, {}, 2) for model in MODELS),
        *((model, {"calibrated": False}, 2) for model in ("DeepSeek-V3", "Nemotron-H")),  # weight-only checkpoints
        ("DeepSeek-V3", {"deterministic": True}, 3),  # the ordered finalize
    ],
)
def test_contiguous_kernels(model, options, kernels, compiler):
    config = MODELS[model]
    with MakeOnGpu():
        assert executor(config, "flat", **options)(flat(config)).shape == (ROWS, config.hidden_size)
    compiler.check(kernels)


@pytest.mark.parametrize("model", MODELS)
def test_masked_kernels(model, compiler):
    config = MODELS[model]
    with MakeOnGpu():
        hidden = torch.zeros(L, ROWS, config.hidden_size, dtype=torch.bfloat16, device="cuda")
        tokens = ExpertMajorTokens(Payload.plain(hidden), torch.zeros(L, dtype=torch.int32, device="cuda"))
        assert executor(config, "expert_major")(tokens).shape == hidden.shape
    compiler.check(kernels=2)


@pytest.mark.parametrize("tile", [128, 256])
@pytest.mark.parametrize("choice", range(4))
def test_tactics_that_tuning_may_choose(tile, choice, compiler, monkeypatch):
    """Every tactic of either GEMM, in pairs; the default pair is in the tests above."""
    from flashinfer.autotuner import AutoTuner
    from flashinfer.fused_moe.cute_dsl import tuner

    first, second = tuner.get_blackwell_gemm1_valid_tactics(tile), tuner.get_blackwell_gemm2_valid_tactics(tile)
    assert (len(first), len(second)) == (2, 4)
    tactic = (tile, first[choice % 2], second[choice])
    assert tactic in tuner.ALL_BLACKWELL_MOE_TACTICS
    config = MODELS["DeepSeek-V3"]
    monkeypatch.setattr(AutoTuner, "choose_one", lambda self, name, runners, *rest: (runners[0], tactic))
    with MakeOnGpu():
        executor(config, "flat")(flat(config))
    compiler.check(kernels=2)
