"""Expert-parallel runtime for Mixture-of-Experts inference on torch.distributed.

Public names are imported when first used, so `import eprt` costs nothing and loads neither torch nor a kernel library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eprt.config import Activation as Activation
    from eprt.config import MoEConfig as MoEConfig
    from eprt.config import ParallelConfig as ParallelConfig
    from eprt.config import Routing as Routing
    from eprt.config import RuntimeConfig as RuntimeConfig
    from eprt.config import SharedExpert as SharedExpert
    from eprt.dispatch import Dispatched as Dispatched
    from eprt.dispatch import Dispatcher as Dispatcher
    from eprt.dispatch import DispatcherSpec as DispatcherSpec
    from eprt.dispatch import Handle as Handle
    from eprt.dispatch import register_dispatcher as register_dispatcher
    from eprt.engines import Engine as Engine
    from eprt.engines import EngineSpec as EngineSpec
    from eprt.errors import CapacityError as CapacityError
    from eprt.errors import CheckpointError as CheckpointError
    from eprt.errors import ConfigError as ConfigError
    from eprt.errors import EprtError as EprtError
    from eprt.errors import InputError as InputError
    from eprt.errors import RankLost as RankLost
    from eprt.errors import UnsupportedError as UnsupportedError
    from eprt.errors import UsageError as UsageError
    from eprt.errors import WorldMismatch as WorldMismatch
    from eprt.experts import ExecutorSpec as ExecutorSpec
    from eprt.experts import PreparedExecutor as PreparedExecutor
    from eprt.experts import register_executor as register_executor
    from eprt.graphs import StepGraphs as StepGraphs
    from eprt.layer import ExpertParallelMoE as ExpertParallelMoE
    from eprt.models import LayerParts as LayerParts
    from eprt.models import ModelFamily as ModelFamily
    from eprt.models import build_layer as build_layer
    from eprt.models import load_layer as load_layer
    from eprt.models import register_family as register_family
    from eprt.models.checkpoint import Checkpoint as Checkpoint
    from eprt.models.checkpoint import load_on_all_ranks as load_on_all_ranks
    from eprt.placement import ExpertPlacement as ExpertPlacement
    from eprt.plan import Plan as Plan
    from eprt.plan import make_plan as make_plan
    from eprt.routing import Router as Router
    from eprt.support import Device as Device
    from eprt.tokens import ExpertMajorTokens as ExpertMajorTokens
    from eprt.tokens import FlatTokens as FlatTokens
    from eprt.tokens import Payload as Payload
    from eprt.tokens import RouterLogits as RouterLogits
    from eprt.tokens import TopK as TopK
    from eprt.weights import Dense as Dense
    from eprt.weights import ExpertWeights as ExpertWeights
    from eprt.weights import Fp8Block as Fp8Block
    from eprt.weights import Fp8Channel as Fp8Channel
    from eprt.weights import Fp8Tensor as Fp8Tensor
    from eprt.weights import Int4 as Int4
    from eprt.weights import LatentWeights as LatentWeights
    from eprt.weights import Mxfp4 as Mxfp4
    from eprt.weights import Mxfp8 as Mxfp8
    from eprt.weights import Nvfp4 as Nvfp4
    from eprt.weights import SharedExpertWeights as SharedExpertWeights
    from eprt.world import World as World
    from eprt.world.collectives import Step as Step
    from eprt.world.shrink import Survivors as Survivors

__version__ = "0.1.0"

_HOME = {
    "eprt.models.checkpoint": "Checkpoint load_on_all_ranks",
    "eprt.config": "Activation MoEConfig ParallelConfig Routing RuntimeConfig SharedExpert",
    "eprt.dispatch": "Dispatched Dispatcher DispatcherSpec Handle register_dispatcher",
    "eprt.engines": "Engine EngineSpec",
    "eprt.errors": (
        "CapacityError CheckpointError ConfigError EprtError InputError RankLost UnsupportedError UsageError "
        "WorldMismatch"
    ),
    "eprt.experts": "ExecutorSpec PreparedExecutor register_executor",
    "eprt.graphs": "StepGraphs",
    "eprt.layer": "ExpertParallelMoE",
    "eprt.models": "LayerParts ModelFamily build_layer load_layer register_family",
    "eprt.placement": "ExpertPlacement",
    "eprt.plan": "Plan make_plan",
    "eprt.routing": "Router",
    "eprt.support": "Device",
    "eprt.tokens": "ExpertMajorTokens FlatTokens Payload RouterLogits TopK",
    "eprt.weights": (
        "Dense ExpertWeights Fp8Block Fp8Channel Fp8Tensor Int4 LatentWeights Mxfp4 Mxfp8 Nvfp4 SharedExpertWeights"
    ),
    "eprt.world": "World",
    "eprt.world.shrink": "Survivors",
    "eprt.world.collectives": "Step",
}
_MODULE = {name: module for module, names in _HOME.items() for name in names.split()}
__all__ = [*_MODULE, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module 'eprt' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE[name]), name)


def __dir__() -> list[str]:
    return __all__
