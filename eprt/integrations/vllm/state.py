"""Asks vLLM for its configuration and for the ranks of its EP group."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch

import eprt
from eprt.config import MoEConfig
from eprt.integrations.engine.balancing import BalanceConfig, Balancing
from eprt.integrations.engine.ranks import world_alone, world_of
from eprt.integrations.engine.state import EngineState, LayerBinding, Sharing
from eprt.integrations.vllm.supported import (
    balance_options,
    captures_graphs,
    gathered_ranks,
    left_whole,
    makes_draft,
    options_of,
    require_lost_in_sleep,
    require_supported,
    runtime_config,
)
from eprt.integrations.vllm.worker import watch_worker
from eprt.world import World

MEMORY = "eprt_memory"  # in `additional_config`
EXTENSION = (
    "eprt: %s can send experts through `model.load_weights` or vLLM's reload alone: their parameters are freed once "
    "they are loaded, and what writes into these itself fails"
)


@dataclass
class PluginState(EngineState):
    """The state that all layers of one vLLM process share.

    Attributes:
        began: `id` of the VllmConfig of the engine that began last, which this must not keep.
    """

    engine = "vLLM"
    logger = logging.getLogger("vllm.eprt")
    eager_flag = "--enforce-eager"

    began: int = 0

    def given(self) -> dict[str, Any]:
        return options_of(_current())

    def makes_draft(self) -> bool:
        return makes_draft()

    def make_world(self, sharing: Sharing) -> World:
        from vllm.distributed import get_tp_group

        return make_world(_ep_group(), get_tp_group(), sharing)

    def reports(self) -> bool:
        return _ep_group().rank_in_group == 0

    def require_supported(self) -> None:
        """Raises FallsBackToEngine where no layer can run under vLLM's configuration."""
        self.require_fit()
        require_supported(_current(), _ep_group().device.type)

    def begin(self, config: Any) -> None:
        """Begins an engine with a VllmConfig: what an earlier one of this process had is forgotten. Raises
        ConfigError."""
        self.forget()
        self.began = id(config)
        if getattr(sys.modules.get("vllm.envs"), "VLLM_ENABLE_STARTUP_PLAN", False):
            # vLLM keeps its plan of memory under the configuration's hash; its own experts take other memory.
            config.additional_config = {**(config.additional_config or {}), MEMORY: eprt.__version__}
        self.take_over_balancing(config)

    def end(self, config: Any) -> None:
        """Frees the experts of the engine that began last, if this VllmConfig is its: vLLM frees the rest, and the
        process may go on."""
        if self.began == id(config):
            self.forget()

    def take_over_balancing(self, config: Any) -> None:
        """Reads what is to be balanced from a VllmConfig, and turns vLLM's own balancing off where eprt's layers take
        its place: they keep whole experts, and vLLM's model has no redundant ones then. Raises ConfigError."""
        flags, device = config.parallel_config, config.device_config.device_type
        found = balance_options(config)
        if flags.enable_eplb and not self.unfit and not left_whole(config, device):
            given = flags.eplb_config
            found = BalanceConfig(**{name: getattr(given, name) for name in BalanceConfig.__dataclass_fields__})
            flags.enable_eplb, given.num_redundant_experts = False, 0
            self.logger.info("eprt: --enable-eplb moves the experts of eprt's layers: %s", found)
        if found is not None and found.num_redundant_experts and runtime_config(config, 1).batch_invariant:
            found = replace(found, num_redundant_experts=0)
            self.logger.warning(
                "eprt: no redundant experts under batch_invariant: which replica a token visits would follow the batch"
            )
        self.balancing = None if found is None else Balancing(found, self.logger)

    def bind(self, name: str, config: MoEConfig, moe: Any) -> LayerBinding:
        """Binds a layer. Collective for the first of its kind. Raises FallsBackToEngine, ConfigError, RankLost.

        Args:
            moe: vLLM's FusedMoEConfig.
        """
        from vllm.distributed import get_tp_group

        watch_worker(self)
        current, sharing = _current(), sharing_of(moe)
        extension = getattr(current.parallel_config, "worker_extension_cls", "")
        if extension and not self.bindings and self.reports():
            self.logger.info(EXTENSION, extension)
        require_lost_in_sleep(name, current)
        tp_size = 1 if sharing == "local" else get_tp_group().world_size
        runtime = runtime_config(current, tp_size, gathered_ranks(moe))
        return self.bind_layer(name, config, sharing, moe.tp_size, runtime, captured=captures_graphs(current))


def _current() -> Any:
    from vllm.config import get_current_vllm_config

    return get_current_vllm_config()


def _ep_group() -> Any:
    """Returns vLLM's EP group. Beside a dense model, whose draft may have experts, vLLM makes none: its ranks are TP's
    then."""
    from vllm.distributed import get_ep_group, get_tp_group

    try:
        return get_ep_group()
    except AssertionError:
        return get_tp_group()


def sharing_of(moe: Any) -> Sharing:
    """Returns who takes part in a layer with this FusedMoEConfig."""
    if not moe.moe_parallel_config.use_ep:
        return "local"
    return "own tokens" if moe.is_sequence_parallel else "same tokens"


def make_world(ep: Any, tp: Any, sharing: Sharing) -> World:
    """Makes a World of vLLM's EP group, ranks in its order (dp, tp), or of this rank alone. Collective."""
    on_cpu = ep.device.type == "cpu"
    if on_cpu:
        torch.cpu._init_amx()  # vLLM's attention takes AMX tiles that only its own experts asked the kernel for
    if sharing == "local":
        return world_alone(ep.device)
    shared_tokens = tp.world_size > 1 and sharing == "same tokens"
    tp_group = tp.cpu_group if on_cpu else tp.device_group
    group = ep.cpu_group if on_cpu else ep.device_group
    return world_of(group, ep.device, tp_group if shared_tokens else None, PluginState.logger)
