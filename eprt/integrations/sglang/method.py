"""SGLang's quantisation method of a MoE layer with eprt's computation, and the dispatcher that leaves tokens alone."""

from __future__ import annotations

import functools
from typing import Any

import torch

from eprt.integrations.engine.bound import BoundLayer, ids_of, run
from eprt.integrations.sglang.parameters import canonical, interleaved, layout_of
from eprt.tokens import TopK


class EprtFusedMoEMethod:
    """Mixes into a FusedMoEMethodBase: parameters and loading stay SGLang's, the computation is eprt's."""

    eprt: BoundLayer

    def restore_weights_before_loading(self, layer: Any) -> None:
        """Does nothing: parameters are as they were declared, and get room as soon as something is loaded."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Builds the layer from the loaded parameters, then frees them; later brings new ones into it, unless a part of
        an expert is missing: SGLang would end the server for an error here. Collective when it builds."""
        if self.eprt.layer is not None and self.eprt.lacking:
            return  # the next step says so
        config = layer.moe_runner_config
        named = functools.partial(canonical, layer)
        self.eprt.load(layer, layout_of(layer), interleaved=interleaved(config), canonical=named)

    def apply(self, layer: Any, dispatch_output: Any, *_: Any, **__: Any) -> Any:
        from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput

        built, x, topk = self.eprt.ready(), dispatch_output.hidden_states, dispatch_output.topk_output
        if hasattr(topk, "to_standard"):
            topk = topk.to_standard(layer.layer_id)
        everywhere, weights = self.eprt.binding.expert_parallel, topk.topk_weights.float()
        marked = everywhere or layer.moe_ep_size > 1  # by -1: rows of padding, and experts of other ranks
        ids = ids_of(topk.topk_ids, built.config.num_experts, signed=marked)
        if (scale := output_scale(layer, x.device, all_to_all=everywhere)) != 1.0:
            weights = weights * scale
        rows = tokens_per_rank(x.shape[0], all_to_all=everywhere)
        return StandardCombineInput(hidden_states=run(built, x, TopK(ids, weights), rows))


def output_scale(layer: Any, device: torch.device, *, all_to_all: bool) -> float:
    """Returns what SGLang's own kernel would multiply a layer's output by: the routed scaling factor, or 1.

    On GPUs its runner applies the factor unless the router has. On CPU, and under an all-to-all, the model does.
    """
    factor = layer.moe_runner_config.routed_scaling_factor
    elsewhere = all_to_all or layer.should_fuse_routed_scaling_factor_in_topk
    return 1.0 if factor is None or elsewhere or device.type != "cuda" else factor


def tokens_per_rank(own: int, *, all_to_all: bool) -> int:
    """Returns R, the largest number of tokens per rank, which every rank knows without asking.

    Under an all-to-all it is the largest of the counts that SGLang agrees on before each step, padding included
    (`layers/dp_attention.py`). While it captures or replays a CUDA graph they are the graph's own, so R is a constant.
    """
    if not all_to_all:
        return max(own, 1)
    from sglang.srt.layers.dp_attention import get_dp_global_num_tokens

    return max(*(get_dp_global_num_tokens() or [own]), 1)


def pass_through() -> Any:
    """Makes a dispatcher that hands tokens on as they are: the layer behind it carries them."""
    from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput

    class PassThroughDispatcher(BaseDispatcher):  # type: ignore[misc]
        def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> Any:
            return StandardDispatchOutput(hidden_states, None, topk_output)

        def combine(self, combine_input: Any) -> torch.Tensor:
            return combine_input.hidden_states

    return PassThroughDispatcher()
