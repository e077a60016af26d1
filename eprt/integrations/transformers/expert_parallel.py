"""`ep_implementation="eprt"`: transformers (from 5.23) shards the experts while it loads, eprt runs them.

    DistributedConfig(fsdp_size=4, ep_size=4, ep_implementation="eprt")     # each rank its own batch

works for every model whose experts transformers plans as `ep_dispatch_experts`: it keeps the router and whatever lies
around the experts, so no family of eprt's is needed. FSDP gathers the dense weights in every forward, those that
`fsdp_plan` says to keep (`{"model.layers.*": "keep_full_weight", ...}`) in the first one only. With `tp_size` the ranks
of a tensor-parallel group hold one batch, and each sends its slice of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from eprt.config import RuntimeConfig
from eprt.errors import UnsupportedError
from eprt.integrations.transformers.agreement import Place
from eprt.integrations.transformers.dense import keep_out_of_state
from eprt.integrations.transformers.experts import activation_of, canonical, config_of, parameter_names, top_k_of
from eprt.layer import ExpertParallelMoE
from eprt.tokens import TopK
from eprt.weights import Dense, ExpertWeights
from eprt.world import World

# transformers makes the implementations itself, one for each experts module, and hands them groups, not a World: the
# modules of all models find the one of their groups here, with the next module's number.
_worlds: dict[tuple[str, str], tuple[World, Iterator[int]]] = {}


def register_expert_parallel(runtime: RuntimeConfig | None = None, name: str = "eprt") -> bool:
    """Lets `DistributedConfig(ep_implementation=name)` run the experts by eprt. Importing the package registers "eprt".

    `runtime` sets capacity, backends and validation of models loaded with that name. Returns whether this transformers
    has such a registry (5.23 and later).
    """
    try:
        from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
    except ImportError:
        return False

    class EprtExpertParallel(EPImplementation):
        """Runs dispatch, experts and combine of one experts module."""

        def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            world, numbers = _world(experts, ep_mesh, tp_mesh)
            experts.__dict__["eprt_place"] = self.place = _ExpertsPlace(experts, world, runtime, next(numbers))

        def __call__(
            self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
        ) -> torch.Tensor:
            self.place.top_k = top_k_index.shape[-1]
            routing = TopK(top_k_index.to(torch.int32).contiguous(), top_k_weights.float().contiguous())
            return self.place(hidden_states.contiguous(), routing)

    EPImplementationInterface.register(name, EprtExpertParallel)
    return True


class _ExpertsPlace(Place):
    """An experts module of transformers. The layer is built at the first call, when the weights are there.

    transformers doesn't say which of the model's layers it is. `number` counts the modules of all models as they are
    loaded, not as they are called: ranks that call different models are told so.
    """

    def __init__(self, experts: nn.Module, world: World, runtime: RuntimeConfig | None, number: int) -> None:
        super().__init__(world, torch.bfloat16)
        self.experts, self.runtime, self.number = experts, runtime, number
        self.top_k: int | None = None
        if (activation := activation_of(experts)) is None:
            raise UnsupportedError(
                f"{type(experts).__name__} computes what no executor does; use another ep_implementation, or "
                "load_without_experts and parallelize, which run the module's own code"
            )
        self.activation = activation

    def _build(self) -> ExpertParallelMoE:
        experts: Any = self.experts
        gate_up, down, *bias = canonical(experts, [_local(getattr(experts, n)) for n in parameter_names(experts)])
        self.dtype = down.dtype
        if experts.num_experts != (L := len(down)):
            raise UnsupportedError(
                f"each expert is spread over {experts.num_experts // L} ranks: choose ep_size = fsdp_size * tp_size"
            )
        top_k = top_k_of(experts) if self.top_k is None else self.top_k
        config = config_of(experts, down, L * self.world.parallel.ep_size, top_k, self.activation)
        weights = ExpertWeights(Dense(gate_up), Dense(down), *bias)
        layer = ExpertParallelMoE(config, self.world, weights, runtime=self.runtime, layer=self.number)
        _drop_weights(experts)
        return layer


def _world(experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> tuple[World, Iterator[int]]:
    """Returns the World around the expert group, with attention TP where a TP group shares its batch, and its modules'
    numbers."""
    ep_group, tp_group = ep_mesh.get_group(), tp_mesh.get_group()
    distributed: Any = getattr(getattr(experts, "config", None), "distributed_config", None)
    # Ranks that share a batch may also send all of it each: that is more work, and never wrong.
    shared = tp_mesh.size() > 1 and distributed is not None
    key = (ep_group.group_name, tp_group.group_name if shared else "")
    if key not in _worlds or _worlds[key][0].closed:
        world = World.from_group(ep_group, ep_mesh.device_type, attention_tp_group=tp_group if shared else None)
        _worlds[key] = world, itertools.count()
    return _worlds[key]


def _local(parameter: Any) -> torch.Tensor:
    tensor: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    if tensor.dtype not in (torch.bfloat16, torch.float32):
        raise UnsupportedError(
            f"experts in {tensor.dtype}: load the model with dtype=torch.bfloat16, or in the checkpoint's own number "
            "format with load_without_experts and parallelize"
        )
    return tensor.detach()


def _drop_weights(experts: Any) -> None:
    """Takes the weights, which the layer holds now, from the module and from FSDP, which must not gather them."""
    from torch.distributed.fsdp import FSDPModule

    managed: bool = isinstance(experts, FSDPModule)
    if managed:
        state: Any = experts._get_fsdp_state()
        if hasattr(state, "_fsdp_param_groups"):
            state._fsdp_param_groups = []
        else:  # torch before 2.12
            state._fsdp_param_group = None
    for name in list(experts._parameters):
        experts._parameters[name] = None
    keep_out_of_state(
        experts,
        "state_dict (or save_pretrained) of a model whose experts eprt runs: they are no parameters any more; save it "
        "before its first batch, or copy the checkpoint that it came from",
        "load_state_dict into a model whose experts eprt runs would leave them as they are: load it before its first "
        "batch, or bring the experts by load_experts of its expert_layers",
    )
