"""The layers that benches measure: those of a table, and those of any model whose config.json eprt reads."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from eprt.config import Activation, MoEConfig, Routing, WeightFormat
from eprt.errors import ConfigError
from eprt.models import family_for
from eprt.models.published import MODELS, model_config
from eprt.models.schemes import scheme_of
from eprt.weights import INT4_GROUPS

_CUT = re.compile(r"(.+):(ep|tp)([1-9]\d*)")


@dataclass(frozen=True)
class ExpertShape:
    """A layer, the EP size that cuts it, and how many columns share a scale of INT4."""

    config: MoEConfig
    ep_size: int
    group: int = INT4_GROUPS[0]


def _experts_of(hf: dict[str, Any]) -> ExpertShape:
    """Returns the experts of a model's last MoE layer, whole. INT4 with a scale a row has groups of 32 here."""
    family = family_for(hf)
    layer = family.moe_layers(hf)[-1]
    config = replace(family.moe_config(hf, layer), routing=Routing(), shared=None)
    group = scheme_of(family.text_config(hf), family.expert_modules(layer)).group
    return ExpertShape(config, 1, group or INT4_GROUPS[0])


def _published(model: str, ep_size: int, weight_format: WeightFormat | None = None) -> ExpertShape:
    shape = _experts_of(MODELS[model])
    config = replace(shape.config, weight_format=weight_format or shape.config.weight_format)
    return replace(shape, config=config, ep_size=ep_size)


SHAPES: dict[str, ExpertShape] = {
    "gpt-oss-120b": _published("gpt-oss-120b", 4),
    "gpt-oss-20b": _published("gpt-oss-20b", 1),
    "deepseek-v4-flash": _published("DeepSeek-V4-Flash", 4),
    "deepseek-v3": _published("DeepSeek-V3", 4, "mxfp4"),
    "deepseek-v3-nvfp4": _published("DeepSeek-V3-NVFP4", 4),
    "deepseek-v3-fp8": _published("DeepSeek-V3", 4),
    "kimi-k2-fp8": _published("Kimi-K2-Instruct", 8),
    "kimi-k2-int4": _published("Kimi-K2-Thinking", 8),
    "qwen3-30b-a3b": _published("Qwen3-30B-A3B", 2),
    "qwen3-30b-fp8": _published("Qwen3-30B-A3B", 1, "fp8_block"),
    "qwen3-30b-gptq": _published("Qwen3-30B-A3B-GPTQ-Int4", 1),
    "qwen3-235b-int4": _published("Qwen3-235B-A22B-GPTQ-Int4", 4),
    "glm-4.5-air": _published("GLM-4.5-Air", 4),
    "glm-4.5-air-fp8-channel": _published("GLM-4.5-Air-FP8", 4),
    "deepseek-v3-fp8-channel": _published("DeepSeek-V3", 4, "fp8_channel"),
    "mixtral-8x7b": _published("Mixtral-8x7B-Instruct-v0.1", 2),
    # Gemma-4-26B-A4B's, a family that eprt has no reader for.
    "gemma-4-26b": ExpertShape(MoEConfig(128, 8, 2816, 704, Activation("geglu"), weight_format="bf16"), 1),
}


def shape_of(name: str) -> ExpertShape:
    """Returns a shape of `SHAPES`, or the experts of a model's last MoE layer.

    Args:
        name: of the table; or a model as `model_config` takes it, whole or cut: `DeepSeek-V3:ep8` has an eighth of the
            experts, `DeepSeek-V3:tp8` all of them with an eighth of the intermediate size.

    Raises:
        ConfigError: neither, or a size that doesn't divide.
    """
    if name in SHAPES:
        return SHAPES[name]
    model, by, parts = found.groups() if (found := _CUT.fullmatch(name)) else (name, "ep", "1")
    try:
        hf = model_config(model)
    except ConfigError as error:
        raise ConfigError(f"shape {name!r}: expected one of {', '.join(SHAPES)}, or a model: {error}") from error
    shape, count = _experts_of(hf), int(parts)
    E, I = shape.config.num_experts, shape.config.intermediate_size
    size, what = (E, "experts") if by == "ep" else (I, "intermediate columns")
    if size % count:
        raise ConfigError(f"shape {name!r}: {size} {what} don't divide by {count}")
    if by == "ep":
        return replace(shape, ep_size=count)
    return replace(shape, config=replace(shape.config, intermediate_size=I // count))


def require_shapes(shapes: Collection[str], known: Iterable[str]) -> None:
    """Raises ConfigError for a shape that isn't known."""
    if unknown := [shape for shape in shapes if shape not in known]:
        raise ConfigError(f"shape {unknown[0]!r}: expected one of {', '.join(known)}")
