"""The table of dispatchers. A new one is a new file and one row here, or a row given to `register_dispatcher`.

Nothing is imported until it is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from eprt.config import MoEConfig, RuntimeConfig, TokenFormat
from eprt.dispatch.base import Dispatcher
from eprt.dispatch.call import Dispatched, Handle
from eprt.dispatch.spec import DEEPEP_MAX_TOKENS, FLASHINFER, SYMM_MAX_RANKS, SYMM_R_BITS, DispatcherSpec
from eprt.errors import ConfigError
from eprt.support import Requirement, load_class, register
from eprt.weights import ExpertWeights, Nvfp4
from eprt.world import World
from eprt.world.agree import Header, exchange, fingerprint_of, shared_errors

__all__ = [
    "DISPATCHERS",
    "Dispatched",
    "Dispatcher",
    "DispatcherSpec",
    "Handle",
    "calibrated_scale",
    "make_dispatcher",
    "register_dispatcher",
]

DISPATCHERS: dict[str, DispatcherSpec] = {
    spec.name: spec
    for spec in (
        DispatcherSpec(
            name="none",
            path="eprt.dispatch.none:AllGatherDispatcher",
            summary="all-gather + reduce-scatter; every rank sees every token",
            formats=("flat",),
            payloads=("bf16", "f32", "fp8_block", "nvfp4"),
            devices=("cpu", "cuda"),
            graph_safe=True,
            shrink="anytime",
            sends="everyone",
            preference=1,
            invariant=(("cpu", 2), ("cuda", 2)),
        ),
        DispatcherSpec(
            name="torch",
            path="eprt.dispatch.torch_alltoall:AllToAllDispatcher",
            summary="all_to_all_single; a token travels once to each rank that needs it",
            formats=("flat", "expert_major"),
            payloads=("bf16", "f32", "fp8_block", "nvfp4"),
            devices=("cpu", "cuda"),
            graph_safe=False,
            shrink="anytime",
            preference=2,
            invariant=(("cpu", math.inf), ("cuda", 2)),
        ),
        DispatcherSpec(
            name="symm",
            path="eprt.dispatch.symm:SymmetricMemoryDispatcher",
            summary="Triton kernels over torch symmetric memory, one NVLink host",
            formats=("flat",),
            payloads=("bf16", "fp8_block", "nvfp4"),
            devices=("cuda",),
            graph_safe=True,
            shrink="anytime",
            max_ranks=SYMM_MAX_RANKS,
            reach="host",
            max_tokens=(1 << SYMM_R_BITS) - 1,
            requirement=Requirement("triton", ("triton", "pytorch-triton"), "3.4"),
            preference=5,
            invariant=(("cuda", math.inf),),
        ),
        DispatcherSpec(
            name="flashinfer",
            path="eprt.dispatch.flashinfer:FlashInferDispatcher",
            summary="FlashInfer one-sided all-to-all over NVLink",
            formats=("flat",),
            payloads=("bf16", "fp8_block", "nvfp4"),
            devices=("cuda",),
            graph_safe=True,
            shrink="between steps",
            combine_payloads=("fp8",),
            reach="fabric",
            max_ranks=63,  # FlashInfer 0.7.2 moeAlltoAllKernels.h: a 64-bit rank mask, one bit for the invalid id
            top_k_sizes=(1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 22),  # its moeAlltoAllKernels.cu, SWITCH_TOP_K
            moe_tp=False,
            requirement=FLASHINFER,
            preference=4,
        ),
        DispatcherSpec(
            name="deepep",
            path="eprt.dispatch.deepep:DeepEPDispatcher",
            summary="DeepEP low latency",
            formats=("expert_major",),
            payloads=("bf16", "fp8_block"),
            devices=("cuda",),
            graph_safe=True,
            shrink="between steps",
            top_k_sizes=tuple(range(1, 12)),  # deep_ep 1.2.1 internode_ll.cu kNumMaxTopK
            hidden_sizes=(2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192),  # its launch.cuh SWITCH_HIDDEN
            max_tokens=DEEPEP_MAX_TOKENS,
            moe_tp=False,
            sends="expert",
            requirement=Requirement("deep_ep", ("tokenspeed-deepep",), "1.2.1", below="2"),
            preference=3,
        ),
    )
}


def register_dispatcher(spec: DispatcherSpec) -> None:
    """Makes a dispatcher of your own known by its name, to layers, the plan, `eprt explain` and `eprt doctor`.

    Holds for this process, so every rank calls it, before the first layer is built: a module that all ranks import is
    the place. Registering an equal spec again changes nothing. The class is imported when it is chosen.

    Args:
        spec: the facts of the dispatcher; `spec.path` is "module:Class" of a `Dispatcher`.

    Raises:
        ConfigError: another dispatcher has the name or the class, or the spec names a format, payload or device that
            doesn't exist.
    """
    register(DISPATCHERS, spec, DispatcherSpec)


def dispatcher_spec(name: str) -> DispatcherSpec:
    """Raises ConfigError for a name that isn't in the table."""
    if name not in DISPATCHERS:
        raise ConfigError(f"dispatcher {name!r} doesn't exist; choose from {', '.join(DISPATCHERS)} or 'auto'")
    return DISPATCHERS[name]


def make_dispatcher(
    name: str,
    world: World,
    config: MoEConfig,
    runtime: RuntimeConfig,
    token_format: TokenFormat | None = None,
    layer: int = 0,
    input_scale: torch.Tensor | None = None,
    settings: Mapping[str, str] | None = None,
) -> Dispatcher:
    """Imports and builds the dispatcher `name`. Collective: the ranks compare what they build before anything shared is
    allocated, so a refusal leaves nothing behind.

    Args:
        input_scale: `calibrated_scale` of this rank's experts. An `nvfp4` payload takes the largest of
            all ranks as its second-level scale; None on all of them means 1, which saturates at 6 * 448 = 2688.
        settings: what else all ranks must have in common, by name.

    Raises:
        ConfigError: an unknown name or format; what the dispatcher refuses; an `nvfp4` payload whose input_scale only
            some ranks have. The same on every rank.
        WorldMismatch: the ranks build different dispatchers, or one rank makes another call.
        UsageError: the world is closed.
    """
    packed = runtime.payload == "nvfp4"
    with shared_errors(world, Header("build", layer, 0)):
        spec = dispatcher_spec(name)
        chosen = token_format or runtime.token_format or spec.formats[0]
        if chosen not in spec.formats:
            raise ConfigError(f"{name} emits {', '.join(spec.formats)}, not {chosen}")
        kind: type[Dispatcher] = load_class(spec, Dispatcher)
        kind.spec = spec
        dispatcher = kind(world, config, runtime, chosen, layer)
        if packed and input_scale is not None and not 0 < (own := float(input_scale)) < math.inf:
            raise ConfigError(f"gate_up.input_scale reaches {own}: expected positive numbers; check the checkpoint")
    common = {**dispatcher.settings, **(settings or {})}
    exchange(world, Header("build", layer, 0, fingerprint=fingerprint_of(common), settings=common))
    world.num_dispatchers += 1
    if packed:
        dispatcher.payload_scale = _agree_payload_scale(world, input_scale)
    return dispatcher


def calibrated_scale(weights: ExpertWeights) -> torch.Tensor | None:
    """Returns the largest `input_scale` of these experts' first matrices, float32 [1], or None if they have none.

    A token is quantised once, before anybody knows which experts it meets, so one scale holds for all of them.
    ModelOpt stores amax / (6 * 448) of what a calibration run saw, which is the factor itself: the largest of them
    keeps every value that any of the experts was calibrated for.
    """
    matrix = weights.gate_up
    if not isinstance(matrix, Nvfp4) or matrix.input_scale is None:
        return None
    return matrix.input_scale.amax().view(1)


def _agree_payload_scale(world: World, own: torch.Tensor | None) -> torch.Tensor:
    """Returns the largest checked scale of the ranks that are left, float32 [1] on the world's device; 1.0 if none has
    one.

    Collective. Raises ConfigError, on every rank, if some ranks have a scale and others don't.
    """
    value = 0.0 if own is None else float(own)
    values = world.gather_control(torch.tensor([value], dtype=torch.float32, device="cpu")).flatten()
    without = [rank for rank, alive in enumerate(world.alive) if alive and not values[rank]]
    if 0 < len(without) < sum(world.alive):
        raise ConfigError(
            f"gate_up.input_scale is missing on ranks {without} and set on the others: nvfp4 tokens need one scale for "
            "all ranks; load every rank from the same checkpoint"
        )
    agreed = 1.0 if without else float(values.max())
    return torch.full((1,), agreed, dtype=torch.float32, device=world.device)
