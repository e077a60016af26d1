"""Hooks into vLLM's quantisation method of a MoE layer: eprt takes over what happens after loading."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from eprt.errors import ConfigError, UsageError
from eprt.integrations.vllm.parameters import INTERLEAVED, FallsBackToVllm, expert_weights, layout_of, mark_unset
from eprt.integrations.vllm.state import LayerBinding, PluginState
from eprt.integrations.vllm.supported import moe_config
from eprt.layer import ExpertParallelMoE
from eprt.tokens import TopK

_LAYERS = "vllm.model_executor.layers."
# What vLLM's methods call in their constructors. Each looks for a kernel and raises where there is none.
_SELECTORS = (
    ("fused_moe.unquantized_fused_moe_method", "select_unquantized_moe_backend"),
    ("quantization.fp8", "select_fp8_moe_backend"),
    ("quantization.mxfp4", "select_mxfp4_moe_backend"),
    ("quantization.mxfp4", "select_deepseek_v4_mxfp4_moe_backend"),
    ("quantization.modelopt", "select_nvfp4_moe_backend"),
)


def install(state: PluginState | None = None) -> None:
    """Wrap `RoutedExperts._get_quant_method`. Idempotent.

    A subclass through `register_oot` wouldn't do: that goes by the class's own name and misses vLLM 0.32's
    GptOssRoutedExperts.

    Args:
        state: shared by all layers; None makes one, which lives as long as the process.

    Raises:
        ConfigError: a vLLM without the names that the plugin hooks into.
    """
    try:
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

        inner = RoutedExperts._get_quant_method
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the plugin doesn't fit this vLLM: {error}") from error
    if getattr(inner, "eprt", False):
        return

    shared = state or PluginState()

    @functools.wraps(inner)
    def get_quant_method(self: Any, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        try:
            shared.require_supported(moe_config.moe_parallel_config)
            with _no_kernel_chosen():
                method = inner(self, prefix, quant_config, moe_config)
            return _adopt(shared, self, method)
        except FallsBackToVllm as reason:
            shared.fall_back(self.layer_name, str(reason))
        return inner(self, prefix, quant_config, moe_config)

    get_quant_method.eprt = True  # type: ignore[attr-defined]
    RoutedExperts._get_quant_method = get_quant_method


@contextmanager
def _no_kernel_chosen() -> Iterator[None]:
    """Keeps methods that are made inside from choosing a kernel: they only declare and load parameters."""
    with ExitStack() as stack:
        for path, name in _SELECTORS:
            module = sys.modules.get(_LAYERS + path)  # not imported: no method of it is made
            if hasattr(module, name):
                stack.enter_context(patch.object(module, name, _no_kernel))
        yield


def _no_kernel(*_: Any, **__: Any) -> tuple[None, None]:
    return None, None


def _adopt(state: PluginState, layer: Any, method: Any) -> Any:
    """Returns `method`, run by eprt from now on. Raises FallsBackToVllm, and what `PluginState.bind` does."""
    binding = state.bind(layer.layer_name, moe_config(layer, method), layer.moe_config)
    adopted: Any = object.__new__(_eprt_kind(type(method)))
    adopted.__dict__.update(method.__dict__)  # what its constructor made: the configuration of parameters and loading
    adopted.eprt = _BoundLayer(state, binding)
    adopted.moe_kernel = Kernel(binding.expert_parallel)
    return adopted


@functools.cache
def _eprt_kind(kind: type) -> type:
    """Makes a subclass under the same name: vLLM's weight loaders go by it."""
    return type(kind.__name__, (EprtMoEMethod, kind), {"__module__": __name__})


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


class _BoundLayer:
    """Holds eprt's layer for a method. It is no module, so that no parameter shows up in vLLM's model."""

    def __init__(self, state: PluginState, binding: LayerBinding) -> None:
        self.state, self.binding = state, binding
        self.layer: ExpertParallelMoE | None = None
        self.parameters: tuple[str, ...] = ()  # the experts': vLLM's module may hold its router's, too


class EprtMoEMethod:
    """Mixes into a FusedMoEMethodBase: parameters and loading stay vLLM's, the computation is eprt's."""

    eprt: _BoundLayer
    moe: Any
    supports_pre_processed_weights = False
    supports_eplb = False
    supports_internal_mk = True
    mk_can_overlap_shared_experts = False
    is_monolithic = False
    skip_forward_padding = False
    has_unpadded_output = False
    topk_indices_dtype = torch.int32

    def maybe_roundup_sizes(self, hidden_size: int, intermediate_size_per_partition: int, *_: Any) -> tuple[int, int]:
        """Leaves the sizes as they are: executors pad on their own."""
        return hidden_size, intermediate_size_per_partition

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        others = {name for name, _ in layer.named_parameters(recurse=False)}
        super().create_weights(layer, *args, **kwargs)  # type: ignore[misc]
        own = {name: value for name, value in layer.named_parameters(recurse=False) if name not in others}
        self.eprt.parameters = tuple(own)
        mark_unset(layout_of(self), own)

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG

        return FUSED_MOE_UNQUANTIZED_CONFIG

    def process_weights_after_loading(self, layer: Any) -> None:
        """Builds the layer from the loaded parameters, then frees them. Collective."""
        bound = self.eprt
        if bound.layer is not None:
            raise UsageError(
                f"{bound.binding.name} is loaded a second time: eprt keeps experts in another layout; restart instead"
            )
        parameters = {name: layer.get_parameter(name) for name in bound.parameters}
        tensors = {name: parameter.data for name, parameter in parameters.items()}
        weights = expert_weights(layout_of(self), tensors, interleaved=layer.activation.value == INTERLEAVED)
        bound.layer = bound.state.build(bound.binding, weights)
        for parameter in parameters.values():
            parameter.data = parameter.data.new_empty(0)

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

        if self.eprt.state.cold:
            self.eprt.state.warm()
        context = get_forward_context()
        built = self.eprt.layer
        if built is None:
            raise UsageError(f"{self.eprt.binding.name} is called before its weights were loaded")
        ids = topk_ids.to(torch.int32)
        padding = getattr(context, "is_padding", None)
        if padding is not None and not self.moe.is_sequence_parallel:
            ids = ids.masked_fill(padding[: ids.shape[0], None], built.config.num_experts)  # rows that nobody reads
        counts = context.dp_metadata if self.eprt.binding.expert_parallel else None
        rows = tokens_per_rank(counts, x.shape[0], self.moe.sp_size)
        return built(x, TopK(ids, topk_weights.float()), tokens_per_rank=rows)

    def apply_monolithic(self, *_: Any, **__: Any) -> torch.Tensor:
        raise UsageError("vLLM asked for a kernel that routes by itself; eprt gets its routing from vLLM's router")


def tokens_per_rank(dp_metadata: Any, own: int, sp_size: int) -> int:
    """Returns R, the largest number of tokens per rank, which every rank knows without asking.

    `dp_metadata` holds the tokens of every DP rank, padding included (`vllm/forward_context.py`): the numbers that
    vLLM's own all-gather goes by. Where the step is captured or replayed, vLLM has padded all of them to one size
    (`v1/worker/dp_utils.py`: should_dp_pad), so R is a constant of the graph. None: no data parallelism, the TP ranks
    hold the same tokens.
    """
    if dp_metadata is None:
        return max(own, 1)
    most = int(dp_metadata.num_tokens_across_dp_cpu.max())
    return max(-(-most // sp_size), 1)
