"""Model families by config.json's `model_type`, and the layers that are read from their checkpoints.

A new family is a new file and a row of `FAMILIES`, or a class of your own given to `register_family`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.errors import CheckpointError, ConfigError
from eprt.json_files import shown
from eprt.kinds import require_kinds
from eprt.layer import ExpertParallelMoE
from eprt.layer.parts import placement_in
from eprt.models import deepseek, families, gpt_oss
from eprt.models.base import ModelFamily as ModelFamily
from eprt.models.checkpoint import Checkpoint, hash63
from eprt.models.hf_config import where
from eprt.placement import ExpertPlacement, ExpertShard
from eprt.routing import Router
from eprt.weights import ExpertWeights, LatentWeights, SharedExpertWeights
from eprt.world import World
from eprt.world.agree import Header, exchange, shared_errors

FAMILIES: dict[str, type[ModelFamily]] = {
    "gpt_oss": gpt_oss.GptOss,
    "qwen2_moe": families.Qwen2Moe,
    "qwen3_moe": families.Qwen3Moe,
    "qwen3_next": families.Qwen3Next,
    "qwen3_5_moe": families.Qwen35Moe,
    "qwen3_5_moe_text": families.Qwen35MoeText,
    "olmoe": families.Olmoe,
    "deepseek_v2": deepseek.DeepseekV2,
    "deepseek_v3": deepseek.DeepseekV3,
    "kimi_k2": deepseek.DeepseekV3,
    "glm4_moe": deepseek.DeepseekV3,
    "dots1": deepseek.Dots1,
    "solar_open": deepseek.SolarOpen,
    "deepseek_v32": deepseek.DeepseekV32,
    "glm_moe_dsa": deepseek.DeepseekV32,
    "glm4_moe_lite": deepseek.DeepseekV32,
    "deepseek_v4": deepseek.DeepseekV4,
    "nemotron_h": families.NemotronH,
    "mixtral": families.Mixtral,
    "minimax": families.Mixtral,
    "minimax_m2": families.MiniMaxM2,
    "phimoe": families.Phimoe,
    "granitemoe": families.GraniteMoe,
    "hunyuan_v1_moe": families.HunyuanV1Moe,
    "ernie4_5_moe": families.Ernie45Moe,
    "llama4": families.Llama4,
    "llama4_text": families.Llama4Text,
}

_REGISTERED: dict[str, type[ModelFamily]] = {}  # what users added in this process


def register_family(model_type: str, family: type[ModelFamily]) -> None:
    """Makes a family of your own known to `load_layer`, `parallelize` and whatever else reads a checkpoint.

    It holds for this process: every rank calls it before it reads a checkpoint. Calling it twice changes nothing.

    Args:
        model_type: as config.json says it.
        family: a subclass of `ModelFamily` that defines `moe_layers` and `moe_config`; instances take no arguments.

    Raises:
        ConfigError: another family has this model_type, or `family` isn't a complete subclass.
    """
    _require_family(model_type, family)
    known = FAMILIES.get(model_type) or _REGISTERED.setdefault(model_type, family)
    if known is not family:
        raise ConfigError(
            f"model_type {model_type!r} is {known.__module__}:{known.__name__} already, not "
            f"{family.__module__}:{family.__name__}: register one of them, or give yours another name"
        )


def _require_family(model_type: object, family: object) -> None:
    if not isinstance(model_type, str) or not model_type:
        raise ConfigError(f"model_type {model_type!r}: expected the text that config.json has")
    if not isinstance(family, type) or not issubclass(family, ModelFamily):
        raise ConfigError(f"family {family!r} of {model_type!r}: expected a subclass of eprt.models.ModelFamily")
    if missing := sorted(family.__abstractmethods__):
        raise ConfigError(f"family {family.__name__} of {model_type!r} doesn't define {', '.join(missing)}")


def has_family(hf: dict[str, Any]) -> bool:
    """Returns whether eprt has a reader for the checkpoints of a Hugging Face config."""
    model_type = hf.get("model_type")
    return isinstance(model_type, str) and model_type in FAMILIES | _REGISTERED


def family_for(hf: dict[str, Any]) -> ModelFamily:
    """Returns the family of a Hugging Face config. Raises ConfigError if it has none here."""
    model_type, known = hf.get("model_type"), FAMILIES | _REGISTERED
    if not has_family(hf):
        words = f"expected {', '.join(known)}; eprt.register_family adds one"
        raise ConfigError(f"{where(hf)}: model_type {shown(model_type)} is not supported: {words}")
    return known[str(model_type)]()


@dataclass(frozen=True)
class LayerParts:
    """All that one rank needs of one MoE layer, on the CPU.

    Attributes:
        layer: its number in the model.
        config: the layer's maths.
        placement: says where every rank's experts lie.
        shard: says which experts, and which slice of each, this rank holds.
        experts: this rank's share.
        router, shared, latent: whole on every rank; None where the model has none.
        module_path: names the module of the transformers model that the layer replaces.
        fingerprint: a hash of config, manifest, router and one sample per kind of tensor. It differs between
            checkpoints, and between revisions of one.
    """

    layer: int
    config: MoEConfig
    placement: ExpertPlacement
    shard: ExpertShard
    experts: ExpertWeights
    router: Router
    shared: SharedExpertWeights | None
    latent: LatentWeights | None
    module_path: str
    fingerprint: int


def load_layer(
    source: str | Path | Checkpoint,
    layer: int,
    parallel: ParallelConfig | None = None,
    rank: int = 0,
    placement: ExpertPlacement | None = None,
) -> LayerParts:
    """Reads one MoE layer of a checkpoint directory with this rank's share of the experts.

    Not collective: `eprt.models.checkpoint.load_on_all_ranks` around it lets all ranks fail, or succeed, together.
    An open Checkpoint is cheaper for many layers. Without `parallel` one rank holds all experts, without `placement`
    experts lie in order.

    Raises:
        CheckpointError: a file or tensor isn't what config.json says, or holds NaN or infinity; a tensor of the layer
            has no use in it.
        ConfigError: the config is incomplete or unsupported, the placement is for other experts or for a world of other
            sizes than `parallel`, or there is no `rank`.
    """
    require_kinds(load_layer, {"source": source, "parallel": parallel, "placement": placement})
    if not isinstance(source, Checkpoint):
        with Checkpoint(source) as checkpoint:
            return load_layer(checkpoint, layer, parallel, rank, placement)
    family = family_for(source.config)
    config = _moe_config(source, family, layer)
    if placement is None or parallel is not None:
        placement = placement_in(parallel or ParallelConfig(), config, placement)
    placement.in_slots(config)  # made for this many experts
    shard, router = placement.shard(rank), family.load_router(source, layer, config)
    names = _names(source, family.block(source, layer))
    router_bytes = router.weight.contiguous().view(torch.uint8).numpy().tobytes()
    parts = LayerParts(
        layer=layer,
        config=config,
        shard=shard,
        experts=family.load_experts(source, layer, config, shard),
        placement=placement,
        router=router,
        shared=family.load_shared(source, layer, config),
        latent=family.load_latent(source, layer, config),
        module_path=family.module_path(layer),
        fingerprint=hash63(str(source.fingerprint).encode(), router_bytes, _samples(source, names)),
    )
    _refuse_unread(source, names, config.num_experts)
    return parts


def _moe_config(source: Checkpoint, family: ModelFamily, layer: int) -> MoEConfig:
    """Returns the layer's config. Raises ConfigError that begins with the file's name."""
    try:
        return family.moe_config(source.config, layer)
    except ConfigError as error:
        if str(error).startswith(where(source.config)):
            raise
        raise ConfigError(f"{where(source.config)}: {error}") from error


def _samples(source: Checkpoint, names: list[str]) -> bytes:
    """Reads the first bytes of one tensor per kind among a block's `names`, the same ones on every rank."""
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(_kind(name), name)
    return b"".join(source.sample(name) for name in first.values())


def _refuse_unread(source: Checkpoint, names: list[str], num_experts: int) -> None:
    """Raises CheckpointError for a tensor of the block that no rank reads.

    A part that config.json doesn't mention, such as a shared expert, would silently be left out of the sum. Another
    rank's experts count as read if this rank reads tensors of that kind. transformers leaves matrices plain whose sizes
    FP8's blocks don't divide, and writes a scale that it never reads beside them.
    """
    experts = {str(expert) for expert in range(num_experts)}
    kinds = {_kind(name) for name in names if name in source.touched}
    plain = {f"{name}_scale_inv" for name in names if source.manifest[name].dtype in ("BF16", "F32")}
    used = source.touched | plain
    for name in names:
        if name not in used and not (_kind(name) in kinds and ["", *_EXPERT.findall(name)][-1] in experts):
            raise CheckpointError(
                f"{source.where(name)} belongs to this layer, and nothing in {where(source.config)} says what it is "
                "for: complete the config, or remove the tensor"
            )


def _names(source: Checkpoint, block: str) -> list[str]:
    """Returns the names of the block's tensors in the checkpoint, in order."""
    return sorted(name for name in source.manifest if name.startswith(f"{block}."))


_EXPERT = re.compile(r"\.experts\.(\d+)(?=\.)")


def _kind(name: str) -> str:
    """Returns the name without its expert's number."""
    return _EXPERT.sub(".experts.*", name)


def build_layer(parts: LayerParts, world: World, runtime: RuntimeConfig | None = None) -> ExpertParallelMoE:
    """Builds the layer that `load_layer` read with `world.parallel` and `world.rank`, ready for `World.warmup`.
    Collective; `parts.experts` aren't kept.

    Raises:
        ConfigError, UnsupportedError: `parts` are another rank's, or as `ExpertParallelMoE`; the same on every rank.
        WorldMismatch: `parts` of other layers, or of other checkpoints, on some ranks.
    """
    require_kinds(build_layer, {"world": world})  # without one, there are no peers to tell
    with shared_errors(world, Header("build")):
        require_kinds(build_layer, {"parts": parts})
        _refuse_foreign(parts, world)
    exchange(world, Header("build", parts.layer, 0, fingerprint=parts.fingerprint))
    return ExpertParallelMoE(
        parts.config,
        world,
        parts.experts,
        runtime=runtime,
        router=parts.router,
        shared=parts.shared,
        latent=parts.latent,
        layer=parts.layer,
        placement=parts.placement,
    )


def _refuse_foreign(parts: LayerParts, world: World) -> None:
    """Raises ConfigError if these experts aren't the ones whose tokens this rank will receive."""
    own = replace(parts.placement, parallel=world.parallel).shard(world.rank)
    if parts.shard != own:
        raise ConfigError(
            f"rank {world.rank} was given {parts.shard}, its share is {own}: read it with "
            "load_layer(..., world.parallel, world.rank)"
        )
