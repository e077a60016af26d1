"""Asks SGLang for its arguments and for the ranks of its TP group."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from eprt.errors import ConfigError
from eprt.integrations.engine.ranks import POLL_S, world_alone, world_of
from eprt.integrations.engine.settings import fall_back
from eprt.integrations.engine.sleeping import Kept, address, addresses
from eprt.integrations.engine.state import EngineState, LayerBinding, Sharing
from eprt.integrations.sglang.supported import (
    ALL_TO_ALL,
    CARRIED,
    EAGER,
    OWN_KERNELS,
    VARIABLE,
    captures_graphs,
    moe_config,
    options,
    require_runner,
    require_supported,
    runtime_config,
)
from eprt.world import World

VERDICT_S = 2.0  # longer than guards need from a closed connection to the verdict, on a busy host


@dataclass
class SglangState(EngineState):
    """The state that all layers of one SGLang process share.

    Attributes:
        architecture: the model that is made now, or was made last.
        drafts: whether that is a draft of another.
        top_k: experts that a token visits, of the router that was made last.
        lacking: what the log was told last of new weights that came in part, or "".
        kept: what comes back with the memory that SGLang gave away.
        loaded_at: addresses of what layers had when the model was loaded, which `--enable-memory-saver` takes away.
    """

    engine = "SGLang"
    logger = logging.getLogger("sglang.eprt")
    eager_flag = EAGER

    architecture: str = ""
    drafts: bool = False
    top_k: int | None = None
    lacking: str = ""
    kept: Kept = field(default_factory=Kept)
    loaded_at: set[int] = field(default_factory=set)

    def given(self) -> dict[str, Any]:
        return options()

    def makes_draft(self) -> bool:
        return self.drafts

    def all_to_all(self) -> bool:
        """Returns whether eprt carries tokens between the ranks."""
        return _arguments().moe_a2a_backend == CARRIED

    def make_world(self, sharing: Sharing) -> World:
        group = _parallel().tp_group
        if sharing == "local":
            return world_alone(group.device)
        ranks = group.cpu_group if group.device.type == "cpu" else group.device_group
        return world_of(ranks, group.device, None, self.logger)

    def reports(self) -> bool:
        return _parallel().tp_rank == 0

    def bind(self, layer: Any) -> LayerBinding:
        """Binds a FusedMoE. Collective for the first of its kind. Raises FallsBackToEngine, ConfigError, RankLost."""
        self.require_fit()
        args, everywhere = _arguments(), self.all_to_all()
        require_supported(args)
        require_runner(_runner(), "--speculative-moe-runner-backend")  # the model's passed, a draft's may differ
        reads = self.architecture in OWN_KERNELS
        fall_back([(reads, f"{self.architecture} multiplies its experts' parameters itself")])
        config = moe_config(layer, all_to_all=everywhere, routed=self.top_k)
        runtime = runtime_config(args, self.options(), all_to_all=everywhere)
        sharing = "own tokens" if everywhere else "local"
        parts = layer.moe_tp_size * (1 if everywhere else layer.moe_ep_size)
        return self.bind_layer(name_of(layer), config, sharing, parts, runtime, captured=captures_graphs(args))

    def leave(self, name: str, reason: str) -> None:
        """Notes a layer that stays with SGLang. Raises ConfigError where SGLang can't run it, or if `strict`."""
        if self.all_to_all():
            off = f"{VARIABLE}='{{\"{ALL_TO_ALL}\": false}}' leaves the layers to SGLang"
            raise ConfigError(f"eprt: {name} can't run, and eprt carries this model's tokens: {reason}; {off}")
        self.fall_back(name, reason)

    def bring_in(self) -> None:
        """Brings new weights into their layers before the next step. Layers of which experts came in part stay as they
        were until the rest comes: SGLang may send an update in pieces, and serve between two."""
        found = [(bound, bound.lacking) for bound in self.unfinished]
        lacking = next((reason for _, reason in found if reason), "")
        if lacking and lacking != self.lacking:
            self.logger.warning("eprt: old weights serve until the rest of the new ones comes: %s", lacking)
        self.lacking = lacking
        whole, cuda = [bound for bound, reason in found if not reason], torch.cuda.is_available()
        if whole and cuda:
            torch.cuda.synchronize()  # they were written on another stream than this step's
        for bound in whole:
            bound.finish()
        if whole and cuda:
            torch.cuda.synchronize()  # their memory goes back to that stream

    def loaded(self) -> None:
        """Warms up, and notes before what of the layers SGLang may take away: it keeps no copy of that."""
        args = _arguments()
        if args.enable_memory_saver and not args.enable_weights_cpu_backup:
            self.loaded_at |= addresses(self.cold)
        self.warm()

    def release(self) -> None:
        """Copies what SGLang is about to take away, less the experts: those are loaded again."""
        self.kept.save(self.built, lambda tensor: address(tensor) in self.loaded_at)

    def await_verdict(self) -> None:
        """Waits a moment for the line that names a lost rank, where ranks watch each other."""
        guards = [world._guard for world in self.worlds.values() if world._guard is not None]
        deadline = time.monotonic() + (VERDICT_S if guards else 0.0)
        while time.monotonic() < deadline:
            time.sleep(4 * POLL_S)  # a verdict is logged within POLL_S
            if any(guard.verdict is not None for guard in guards):
                deadline = min(deadline, time.monotonic() + 4 * POLL_S)


def name_of(layer: Any) -> str:
    """Returns the name of a FusedMoE, of which Hunyuan's and Grok's have none."""
    return layer.layer_name or f"layers.{layer.layer_id}"


def _arguments() -> Any:
    """Returns what SGLang made of its arguments; since 0.5.23 it doesn't write that into them."""
    from sglang.srt.runtime_context import get_server_args

    args = get_server_args()
    if not hasattr(args, "resolve_once"):
        return args
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(args)


def _runner() -> str:
    """Returns the name of the runner for layers that SGLang makes now."""
    from sglang.srt.layers.moe import get_moe_runner_backend

    return get_moe_runner_backend().value


def _parallel() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()
