"""The hook: vLLM's quantisation method of a MoE layer, changed in what happens after loading."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from eprt.errors import ConfigError, UsageError
from eprt.integrations.vllm.host import Host, Seat
from eprt.integrations.vllm.parameters import INTERLEAVED, LeftToVllm, expert_weights, layout_of, mark_unset
from eprt.integrations.vllm.terms import moe_config
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

_host = Host()


def install() -> None:
    """Wrap `RoutedExperts._get_quant_method`. Idempotent.

    Not a subclass through `register_oot`: that goes by the class's own name and misses vLLM 0.32's
    GptOssRoutedExperts.

    Raises:
        ConfigError: a vLLM without the names that the plugin hooks into.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    inner = getattr(RoutedExperts, "_get_quant_method", None)
    if inner is None:
        raise ConfigError("this vLLM has no RoutedExperts._get_quant_method: the plugin doesn't fit it")
    if getattr(inner, "eprt", False):
        return

    @functools.wraps(inner)
    def get_quant_method(self: Any, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        if not moe_config.moe_parallel_config.use_ep:
            return inner(self, prefix, quant_config, moe_config)
        with _no_kernel_chosen():
            method = inner(self, prefix, quant_config, moe_config)
        try:
            return _adopt(self, method)
        except LeftToVllm as reason:
            _host.leave(self.layer_name, str(reason))
        return inner(self, prefix, quant_config, moe_config)

    get_quant_method.eprt = True  # type: ignore[attr-defined]
    RoutedExperts._get_quant_method = get_quant_method


@contextmanager
def _no_kernel_chosen() -> Iterator[None]:
    """Methods made inside have no kernel of vLLM's: they only declare and load parameters."""
    with ExitStack() as stack:
        for path, name in _SELECTORS:
            module = sys.modules.get(_LAYERS + path)  # not imported: no method of it is made
            if hasattr(module, name):
                stack.enter_context(patch.object(module, name, _no_kernel))
        yield


def _no_kernel(*_: Any, **__: Any) -> tuple[None, None]:
    return None, None


def _adopt(layer: Any, method: Any) -> Any:
    """`method`, run by eprt from now on. Raises LeftToVllm, and what `Host.seat` does."""
    config = moe_config(layer, method)
    seat = _host.seat(layer.layer_name, config, layer.moe_config.is_sequence_parallel)
    adopted: Any = object.__new__(_over(type(method)))
    adopted.__dict__.update(method.__dict__)  # what its constructor made: the configuration of parameters and loading
    adopted.eprt = _State(seat)
    adopted.moe_kernel = Kernel()
    return adopted


@functools.cache
def _over(kind: type) -> type:
    """A subclass under the same name: vLLM's weight loaders go by it."""
    return type(kind.__name__, (EprtMoEMethod, kind), {"__module__": __name__})


class Kernel:
    """What vLLM's runner asks a modular kernel: here, one that sums over the ranks itself."""

    is_monolithic = False
    can_overlap_shared_experts = False
    consumes_expert_mask = False

    def output_is_reduced(self) -> bool:
        return True

    def topk_indices_dtype(self) -> torch.dtype:
        return torch.int32

    @property
    def impl(self) -> Kernel:
        return self

    fused_experts = prepare_finalize = impl


class _State:
    """What a method holds for eprt; not a module, so that no parameter shows up in vLLM's model."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.layer: ExpertParallelMoE | None = None
        self.parameters: tuple[str, ...] = ()  # the experts': vLLM's module may hold its router's, too


class EprtMoEMethod:
    """Over a FusedMoEMethodBase: its parameters and loading, eprt's computation."""

    eprt: _State
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
        """Executors pad on their own."""
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
        """Collective: build the layer from what was loaded, then let go of it."""
        state = self.eprt
        if state.layer is not None:
            raise UsageError(
                f"{state.seat.name} is loaded a second time: eprt keeps its experts in another layout; restart instead"
            )
        parameters = {name: layer.get_parameter(name) for name in state.parameters}
        tensors = {name: parameter.data for name, parameter in parameters.items()}
        interleaved = layer.activation.value == INTERLEAVED
        state.layer = _host.build(state.seat, expert_weights(layout_of(self), tensors, interleaved=interleaved))
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

        if _host.cold:
            _host.warm()
        context = get_forward_context()
        built = self.eprt.layer
        if built is None:
            raise UsageError(f"{self.eprt.seat.name} is called before its weights were loaded")
        ids = topk_ids.to(torch.int32)
        padding = getattr(context, "is_padding", None)
        if padding is not None and not self.moe.is_sequence_parallel:
            ids = ids.masked_fill(padding[: ids.shape[0], None], built.config.num_experts)  # rows that nobody reads
        rows = tokens_per_rank(context.dp_metadata, x.shape[0], self.moe.sp_size)
        return built(x, TopK(ids, topk_weights.float()), tokens_per_rank=rows)

    def apply_monolithic(self, *_: Any, **__: Any) -> torch.Tensor:
        raise UsageError("vLLM asked for a kernel that routes by itself; eprt gets its routing from vLLM's router")


def tokens_per_rank(dp_metadata: Any, own: int, sp_size: int) -> int:
    """R, known to every rank without asking.

    `dp_metadata` holds the tokens of every DP rank, padding included (`vllm/forward_context.py`): the numbers that
    vLLM's own all-gather goes by. Where the step is captured or replayed, vLLM has padded all of them to one size
    (`v1/worker/dp_utils.py`: should_dp_pad), so R is a constant of the graph. None: no data parallelism, the TP ranks
    hold the same tokens.
    """
    if dp_metadata is None:
        return max(own, 1)
    most = int(dp_metadata.num_tokens_across_dp_cpu.max())
    return max(-(-most // sp_size), 1)
