"""Makes the models of `eprt bench step`: transformers' own classes, published widths, random weights."""

from __future__ import annotations

import json
from typing import Any

import torch

from eprt.conformance.tiny_model import gpt_oss_config
from eprt.errors import ConfigError
from eprt.models.published import MODELS as MODEL_CONFIGS

_PUBLISHED = {"gpt-oss-120b": "gpt-oss-120b", "qwen3-30b-a3b": "Qwen3-30B-A3B", "deepseek-v3": "DeepSeek-V3"}
MODELS = (*_PUBLISHED, "tiny")


def _config_of(name: str, layers: int) -> dict[str, Any]:
    """Returns the published config.json cut to `layers` layers, each of which has experts."""
    if name not in MODELS:
        raise ConfigError(f"--models {name!r}: expected some of {', '.join(MODELS)}")
    tiny = gpt_oss_config(layers, 8, 4, 128, 256)
    if name == "tiny":
        return tiny
    cut = MODEL_CONFIGS[_PUBLISHED[name]] | {"num_hidden_layers": layers}
    if "first_k_dense_replace" in cut:
        cut["first_k_dense_replace"] = 0
    return tiny | cut if cut["model_type"] == "gpt_oss" else cut


def make_model(name: str, layers: int, device: torch.device) -> tuple[Any, dict[str, Any]]:
    """Returns (the model in bf16 with random weights on the device, the published config of its layers).

    The config includes the number format of the experts.

    Raises:
        ConfigError: an unknown name, or transformers isn't installed.
    """
    published = _config_of(name, layers)
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError("bench step runs transformers' own models: pip install 'eprt[transformers]'") from error
    if "layer_types" in published:
        published["layer_types"] = ["full_attention"] * layers  # a short context: no window would be full
    fields = {key: value for key, value in published.items() if key not in ("quantization_config", "architectures")}
    config: Any = AutoConfig.for_model(**fields)
    config.dtype = torch.bfloat16
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.eval().requires_grad_(False)
    said = json.loads(config.to_json_string(use_diff=False))
    said.pop("quantization_config", None)
    if "quantization_config" in published:
        said["quantization_config"] = published["quantization_config"]
    return model, said
