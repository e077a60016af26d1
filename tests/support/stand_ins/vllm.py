"""As much of vLLM as its plugin touches, in one process of a gloo world: where a method is made, loaded and called.

Written from vLLM 0.26's `fused_moe/routed_experts.py`, `fused_moe_method_base.py`, `runner/moe_runner.py` and
`forward_context.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

_LAYERS = "vllm.model_executor.layers."


class FusedMoEMethodBase:
    """Chooses a kernel when it is made, and raises where there is none, as vLLM's methods do."""

    module = ""
    selector = ""

    def __init__(self, moe: Any) -> None:
        self.moe = moe
        self.moe_quant_config = None
        self.moe_kernel: Any = None
        self.kernel, _ = getattr(sys.modules[_LAYERS + self.module], self.selector)(moe)

    @property
    def is_monolithic(self) -> bool:
        return True

    @property
    def topk_indices_dtype(self) -> None:
        return None

    def maybe_make_prepare_finalize(self, **_: Any) -> None:
        raise ValueError("an unquantised layer has no kernel of this kind")

    def process_weights_after_loading(self, layer: Any) -> None:
        raise AssertionError("vLLM's own layout")

    def apply(self, **_: Any) -> torch.Tensor:
        raise AssertionError("vLLM's own experts")


class UnquantizedFusedMoEMethod(FusedMoEMethodBase, nn.Module):
    module, selector = "fused_moe.unquantized_fused_moe_method", "select_unquantized_moe_backend"

    def __init__(self, moe: Any) -> None:
        nn.Module.__init__(self)
        super().__init__(moe)

    def create_weights(self, layer: nn.Module, tensors: dict[str, torch.Tensor], **_: Any) -> None:
        for name, tensor in tensors.items():
            parameter = nn.Parameter(tensor.clone(), requires_grad=False)
            parameter.weight_loader = layer.weight_loader
            layer.register_parameter(name, parameter)


class MoeWNA16Method(UnquantizedFusedMoEMethod):
    """One that eprt doesn't read."""


class PerTokenMethod(UnquantizedFusedMoEMethod):
    """One that asks which kernel it has chosen, as NVFP4's with activations by token."""

    def __init__(self, moe: Any) -> None:
        super().__init__(moe)
        if self.kernel is None:
            raise ValueError("another kernel is needed")


def _no_kernel(_: Any) -> Any:
    raise NotImplementedError("no kernel on this machine")


def _no_group() -> Any:
    raise AssertionError("expert parallel group is not initialized")


class RoutedExperts(nn.Module):
    def __init__(self, name: str, moe: Any, activation: str, tensors: dict[str, torch.Tensor], method: type) -> None:
        super().__init__()
        self.layer_name = name
        self.moe_config = moe
        self.activation = SimpleNamespace(value=activation)
        self.params_dtype = torch.bfloat16
        self.expert_map_manager = SimpleNamespace(num_fused_shared_experts=0)
        self.expert_placement_strategy = "linear"
        self.apply_router_weight_on_input = False
        self.kind = method
        self.quant_method = self._get_quant_method(name, None, moe)
        self.quant_method.create_weights(self, tensors=tensors)

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        return self.kind(moe_config)

    def _map_global_expert_id_to_local_expert_id(self, expert_id: int) -> int:
        held = self.moe_config.num_experts // self.moe_config.ep_size
        rank = dist.get_rank() if self.moe_config.ep_size > 1 else 0
        return expert_id - rank * held if expert_id // held == rank else -1

    def weight_loader(
        self, param: Any, loaded_weight: torch.Tensor, weight_name: str, shard_id: str, expert_id: int
    ) -> None:
        """One matrix of one expert: w1 (gate) over w3 (up), or w2."""
        local = self._map_global_expert_id_to_local_expert_id(expert_id)
        if local < 0:
            return
        rows = param.data[local]
        if shard_id != "w2":
            rows = rows.chunk(2)[shard_id == "w3"]
        rows.copy_(loaded_weight)


class ReplicatedLinear(nn.Module):
    """A gate: logits in the weight's dtype. `out_dtype` is vLLM 0.32's GateLinear's."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = bias
        self.out_dtype = out_dtype
        self.skip_bias_add = False
        self.quant_method = type("UnquantizedLinearMethod", (), {})()

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
        raise AssertionError("vLLM's own gate")


class FusedTopKRouter:
    """`router/base_router.py`: what is recorded is what `_compute_routing` chose."""

    def __init__(
        self, top_k: int, num_experts: int, *, scoring_func: str = "softmax", renormalize: bool = True
    ) -> None:
        self.top_k, self.global_num_experts = top_k, num_experts
        self.scoring_func, self.renormalize = scoring_func, renormalize
        self.eplb_state = None
        self.recorded: torch.Tensor | None = None

    def _compute_routing(self, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("vLLM's own choice")

    def select_experts(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor, topk_indices_dtype: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, self.recorded = self._compute_routing(hidden_states, router_logits, topk_indices_dtype, input_ids=None)
        return weights, self.recorded.to(topk_indices_dtype)


class GroupedTopKRouter(FusedTopKRouter):
    """`router/grouped_topk_router.py`, by a sigmoid."""

    def __init__(
        self, top_k: int, num_experts: int, bias: torch.Tensor, groups: tuple[int, int], factor: float
    ) -> None:
        super().__init__(top_k, num_experts, scoring_func="sigmoid")
        self.e_score_correction_bias, self.routed_scaling_factor = bias, factor
        self.num_expert_group, self.topk_group = groups
        self.num_fused_shared_experts = 0


class FusedTopKBiasRouter(GroupedTopKRouter):
    """`router/fused_topk_bias_router.py`: without groups."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        del self.num_expert_group, self.topk_group
        self._hash_indices_table = self.bias_vl = None


class MoERunner(nn.Module):
    """`runner/moe_runner.py`, `_forward_impl` up to the choice."""

    def __init__(self, gate: nn.Module | None, router: Any, experts: Any) -> None:
        super().__init__()
        self.gate, self.router, self.routed_experts = gate, router, experts
        self._fse_fuse_gate = False

    def choose(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.gate is not None:
            router_logits, _ = self.gate(hidden_states)
        return self.router.select_experts(
            hidden_states=hidden_states, router_logits=router_logits, topk_indices_dtype=torch.int32
        )


@dataclass
class ForwardContext:
    """`forward_context.py`, since 0.32."""

    is_padding: torch.Tensor | None = None


class HoldsGate(nn.Module):
    """`models/qwen3_moe.py`: a block whose gate the runner calls."""

    held = True

    def __init__(self, gate: nn.Module, router: Any, experts: Any) -> None:
        super().__init__()
        self.gate = gate
        self.experts = MoERunner(gate if self.held else None, router, experts)

    def choose(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.experts.choose(hidden_states, hidden_states if self.held else self.gate(hidden_states)[0])


class OtherBlock(HoldsGate):
    """One that calls its gate itself, and does with the logits what it likes."""

    held = False


class MLPBlock(OtherBlock):
    """`models/gpt_oss.py`: one that gives them to the experts as they are."""

    @property
    def router(self) -> nn.Module:
        return self.gate


def init_modular_kernel(method: Any) -> None:
    """`MoERunner.maybe_init_modular_kernel` of vLLM 0.26, which is called of every layer once it is loaded."""
    if not (method.supports_internal_mk or method.is_monolithic):
        assert method.maybe_make_prepare_finalize(routing_tables=None) is None


class EpGroup(SimpleNamespace):
    """`distributed/parallel_state.py`. vLLM's own kernels gather tokens and their choice over it where each rank has a
    part of every expert, and sum the parts: `prepare_finalize/naive_dp_ep.py`, in all versions."""

    def dispatch(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return [torch.cat(self._every(tensor)) for tensor in tensors]

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._every(rows)).sum(0).split(self.tokens)[self.rank_in_group]

    def _every(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        found: list[Any] = [None] * len(self.tokens)
        dist.all_gather_object(found, tensor)
        return found


def model_of(config: Any, blocks: list[nn.Module]) -> nn.Module:
    """A model as vLLM compiles it: with its VllmConfig beside its layers."""
    model: Any = nn.ModuleList(blocks)
    model.vllm_config = config
    return model


def host(**changes: Any) -> Any:
    """A VllmConfig as far as the plugin reads it; `changes` are `section.field` with dots as two underscores."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            enable_eplb=False,
            use_ubatching=False,
            enable_elastic_ep=False,
            prefill_context_parallel_size=1,
            all2all_backend="allgather_reducescatter",
            data_parallel_size=1,
        ),
        model_config=SimpleNamespace(enforce_eager=False, enable_sleep_mode=False),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(name="FULL_AND_PIECEWISE"),
            cudagraph_capture_sizes=[1, 2, 512],
        ),
        load_config=SimpleNamespace(load_format="auto"),
        lora_config=None,
        weight_transfer_config=None,
        additional_config={},
    )
    for path, value in changes.items():
        section, _, field = path.rpartition("__")
        setattr(getattr(config, section) if section else config, field, value)
    return config


def moe_config(
    num_experts: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    ranks: int,
    *,
    use_ep: bool = True,
    dp_size: int = 1,
    is_sequence_parallel: bool = False,
) -> Any:
    """A FusedMoEConfig; without expert parallelism each of the ranks has its part of `intermediate`."""
    tp_size = 1 if use_ep else ranks
    return SimpleNamespace(
        num_experts=num_experts,
        num_logical_experts=num_experts,
        ep_size=ranks if use_ep else 1,
        tp_size=tp_size,
        sp_size=1,
        is_sequence_parallel=is_sequence_parallel,
        experts_per_token=top_k,
        hidden_dim=hidden,
        intermediate_size_per_partition=intermediate // tp_size,
        has_bias=False,
        in_dtype=torch.bfloat16,
        skip_final_all_reduce=False,
        moe_parallel_config=SimpleNamespace(use_ep=use_ep, dp_size=ranks if use_ep else dp_size),
    )


@contextmanager
def installed(config: Any, tokens: list[int], unfit: str = "", *, dense: bool = False) -> Iterator[SimpleNamespace]:
    """vLLM's modules, and the plugin in them; `tokens` are those of each DP rank. Yields the forward context.

    A dense model, which may have a draft with experts, has no EP group.
    """
    from eprt.integrations.vllm import method
    from eprt.integrations.vllm.state import PluginState

    context = SimpleNamespace(dp_metadata=None, is_padding=None)
    context.dp_metadata = SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(tokens, dtype=torch.int32))
    group = EpGroup(
        device=torch.device("cpu"),
        cpu_group=dist.group.WORLD,
        device_group=None,
        rank_in_group=dist.get_rank(),
        tokens=tokens,
    )
    alone = SimpleNamespace(**vars(group) | {"world_size": 1, "cpu_group": None})
    routed = type("RoutedExperts", (RoutedExperts,), {})  # patched here, so fresh each time
    modules: dict[str, dict[str, Any]] = {
        _LAYERS + "fused_moe.routed_experts": {"RoutedExperts": routed},
        _LAYERS + "fused_moe.config": {"FUSED_MOE_UNQUANTIZED_CONFIG": "unquantized"},
        "vllm.config": {"get_current_vllm_config": lambda: config},
        "vllm.distributed": {
            "get_ep_group": _no_group if dense else lambda: group,
            "get_tp_group": lambda: alone,
        },
        "vllm.forward_context": {"get_forward_context": lambda: context, "ForwardContext": ForwardContext},
    }
    for module, name in method._SELECTORS:
        modules.setdefault(_LAYERS + module, {})[name] = _no_kernel
    made: dict[str, ModuleType] = {}
    for path, names in modules.items():
        module = made[path] = ModuleType(path)
        vars(module).update(names)
        parts = path.split(".")
        for n in range(1, len(parts)):
            made.setdefault(".".join(parts[:n]), ModuleType(".".join(parts[:n])))
    state = PluginState(unfit=unfit)
    with mock.patch.dict(sys.modules, made):
        method.install(state)
        method.install(state)  # vLLM may load plugins twice
        yield SimpleNamespace(context=context, routed=routed, state=state)
        for world in state.worlds.values():
            world.close()
