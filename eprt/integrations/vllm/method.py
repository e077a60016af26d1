"""Hooks into vLLM's quantisation method of a MoE layer: eprt takes over what happens after loading."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from eprt.errors import ConfigError, UsageError
from eprt.integrations.engine.bound import BoundLayer, adopted, ids_of, run
from eprt.integrations.engine.parameters import FallsBackToEngine
from eprt.integrations.vllm.parameters import INTERLEAVED, layout_of
from eprt.integrations.vllm.routing import marks_padding, padding_of
from eprt.integrations.vllm.state import PluginState
from eprt.integrations.vllm.supported import gathered_ranks, moe_config, whole_part
from eprt.rounding import ceil_div
from eprt.tokens import TopK

_LAYERS = "vllm.model_executor.layers."
_COMPRESSED = "quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_"
# What vLLM's methods call in their constructors. Each looks for a kernel and raises where there is none.
_SELECTORS = (
    ("fused_moe.unquantized_fused_moe_method", "select_unquantized_moe_backend"),
    ("quantization.fp8", "select_fp8_moe_backend"),
    ("quantization.online.fp8", "select_fp8_moe_backend"),
    ("quantization.mxfp4", "select_mxfp4_moe_backend"),
    ("quantization.mxfp4", "select_deepseek_v4_mxfp4_moe_backend"),
    ("quantization.modelopt", "select_nvfp4_moe_backend"),
    (_COMPRESSED + "wna16", "select_wna16_moe_backend"),
    (_COMPRESSED + "w8a8_fp8", "select_fp8_moe_backend"),
    (_COMPRESSED + "w4a4_nvfp4", "select_nvfp4_moe_backend"),
    ("quantization.auto_gptq", "select_wna16_moe_backend"),
    ("quantization.auto_awq", "select_wna16_moe_backend"),
)


def install(state: PluginState) -> None:
    """Wraps `RoutedExperts._get_quant_method`. Idempotent. Raises ConfigError: a vLLM without that name.

    A subclass through `register_oot` wouldn't do: that goes by the class's own name and misses vLLM 0.32's
    GptOssRoutedExperts.
    """
    try:
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

        inner = RoutedExperts._get_quant_method
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the plugin doesn't fit this vLLM: {error}") from error
    if getattr(inner, "eprt", False):
        return

    @functools.wraps(inner)
    def get_quant_method(self: Any, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        try:
            state.require_supported()
            return _adopt(state, self, _without_kernel(inner, self, prefix, quant_config, moe_config))
        except FallsBackToEngine as reason:
            state.fall_back(self.layer_name, str(reason))
        return inner(self, prefix, quant_config, moe_config)

    get_quant_method.eprt = True  # type: ignore[attr-defined]
    RoutedExperts._get_quant_method = get_quant_method


def _without_kernel(make: Callable[..., Any], *args: Any) -> Any:
    """Makes a method that has chosen no kernel. Raises FallsBackToEngine for one that asks which it has."""
    try:
        with _no_kernel_chosen():
            return make(*args)
    except FallsBackToEngine:
        raise
    except Exception as error:  # of any type: vLLM makes the method itself then, and says what is wrong if anything is
        raise FallsBackToEngine(f"its method isn't made without a kernel of vLLM's: {error}") from error


@contextmanager
def _no_kernel_chosen() -> Iterator[None]:
    """Keeps methods that are made inside from choosing a kernel: they only declare and load parameters."""
    with ExitStack() as stack:
        for path, name in _SELECTORS:
            module = _module(path)  # None: no method of it is made
            if hasattr(module, name):
                stack.enter_context(patch.object(module, name, _no_kernel))
        yield


def _module(path: str) -> ModuleType | None:
    """Returns a module of vLLM that is loaded, or, of a package that imports its methods late, will be."""
    package = path.split(".")[1]
    if path.count(".") > 1 and f"{_LAYERS}quantization.{package}.{package}" in sys.modules:
        with suppress(ImportError):  # another vLLM has other files
            return importlib.import_module(_LAYERS + path)
    return sys.modules.get(_LAYERS + path)


def _no_kernel(*_: Any, quant_config: Any = None, **__: Any) -> tuple[None, None]:
    strategy = getattr(quant_config, "strategy", None)
    if getattr(strategy, "value", strategy) == "channel":  # the constructor wants Marlin's name then
        raise FallsBackToEngine("INT4 with one scale a row, which vLLM keeps for Marlin alone")
    return None, None


def _adopt(state: PluginState, layer: Any, method: Any) -> Any:
    """Returns `method`, run by eprt from now on. Raises FallsBackToEngine, and what `PluginState.bind` does."""
    binding = state.bind(layer.layer_name, moe_config(layer, method), layer.moe_config)
    made = adopted(method, EprtMoEMethod, BoundLayer(state, binding))
    made.moe_kernel = Kernel(binding.expert_parallel)
    return made


class Kernel:
    """Answers what vLLM's runner asks a modular kernel.

    Args:
        reduces: it sums over the ranks itself; else vLLM sums the ranks' partial outputs, as it does for its own.
    """

    is_monolithic = False
    can_overlap_shared_experts = False
    consumes_expert_mask = False

    def __init__(self, reduces: bool) -> None:
        self._reduces = reduces

    def output_is_reduced(self) -> bool:
        return self._reduces

    def topk_indices_dtype(self) -> torch.dtype:
        return torch.int32

    @property
    def impl(self) -> Kernel:
        return self

    fused_experts = prepare_finalize = impl


class EprtMoEMethod:
    """Mixes into a FusedMoEMethodBase: parameters and loading stay vLLM's, the computation is eprt's."""

    eprt: BoundLayer
    moe: Any
    supports_pre_processed_weights = False
    supports_eplb = False
    supports_internal_mk = True
    mk_can_overlap_shared_experts = False
    is_monolithic = False
    skip_forward_padding = False
    has_unpadded_output = False
    topk_indices_dtype = torch.int32

    @functools.cached_property
    def padding(self) -> Callable[[], torch.Tensor | None] | None:
        return padding_of(self)

    @functools.cached_property
    def gathering(self) -> Any:
        """vLLM's group over which tokens are gathered, and the ranks' parts of their outputs summed; or None. vLLM's
        runner would gather in front of the router, which sees a mask of its own rank's tokens."""
        if gathered_ranks(self.moe) == 1:
            return None
        from vllm.distributed import get_ep_group

        return get_ep_group()

    @functools.cached_property
    def signed(self) -> bool:
        return self.padding is None and marks_padding()

    def maybe_roundup_sizes(self, hidden_size: int, intermediate_size_per_partition: int, *_: Any) -> tuple[int, int]:
        """Rounds up to whole scales alone: executors pad on their own."""
        return hidden_size, whole_part(self, intermediate_size_per_partition)

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        others = {name for name, _ in layer.named_parameters(recurse=False)}
        super().create_weights(layer, *args, **kwargs)  # type: ignore[misc]
        own = {name: value for name, value in layer.named_parameters(recurse=False) if name not in others}
        self.eprt.declared(own, layout_of(self), layer)

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG

        return FUSED_MOE_UNQUANTIZED_CONFIG

    def process_weights_after_loading(self, layer: Any) -> None:
        """Builds the layer from the loaded parameters, then frees them. Collective. vLLM's layerwise reload calls it
        again, with new weights."""
        self.eprt.load(layer, layout_of(self), interleaved=layer.activation.value == INTERLEAVED)

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: Any = None,
    ) -> torch.Tensor:
        from vllm.forward_context import get_forward_context

        built = self.eprt.ready()
        theirs = built.router is None  # eprt's own choice has left padding out
        marked = self.padding if theirs else None
        signed = theirs and self.signed
        ids = ids_of(topk_ids, built.config.num_experts, None if marked is None else marked(), signed=signed)
        weights, group = topk_weights.float(), self.gathering
        if group is not None:
            x, weights, ids = group.dispatch(x, weights, ids)
        counts = get_forward_context().dp_metadata if self.eprt.binding.expert_parallel else None
        rows = tokens_per_rank(counts, x.shape[0], self.moe.sp_size)
        output = run(built, x, TopK(ids, weights), rows)
        return output if group is None else group.combine(output)

    def apply_monolithic(self, *_: Any, **__: Any) -> torch.Tensor:
        raise UsageError("vLLM asked for a kernel that routes by itself; eprt gets its routing from vLLM's router")


def tokens_per_rank(dp_metadata: Any, own: int, sp_size: int) -> int:
    """Returns R, the largest number of tokens per rank, which every rank knows without asking.

    `dp_metadata` holds the tokens of every DP rank, padding included (`vllm/forward_context.py`): the numbers that
    vLLM's own all-gather goes by. Where the step is captured or replayed, vLLM has padded all of them to one size
    (`v1/worker/dp_utils.py`: should_dp_pad), so R is a constant of the graph. None: no data parallelism, the TP ranks
    hold the same tokens.
    """
    most = own if dp_metadata is None else ceil_div(int(dp_metadata.num_tokens_across_dp_cpu.max()), sp_size)
    return max(most, 1)
