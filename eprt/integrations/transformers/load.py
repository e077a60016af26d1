"""Loads a transformers model without its experts: no rank holds, or reads, more than `parallelize` will give it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eprt.errors import CheckpointError, ConfigError, EprtError, one_block
from eprt.integrations.transformers.dense import refusing
from eprt.integrations.transformers.experts import leave_out, refuse_to_run
from eprt.json_files import shown
from eprt.kinds import require_kinds
from eprt.models import ModelFamily, family_for, has_family
from eprt.models.checkpoint import Checkpoint
from eprt.models.hf_config import flatten, section

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_WHERE = ("cache_dir", "force_download", "local_files_only", "revision", "token")
_MODELS = ("dtype", "torch_dtype", "quantization_config")  # of the model as it is loaded, whatever its config says
_ELSEWHERE = ("variant", "gguf_file", "key_mapping")  # let `from_pretrained` read other files, or by other names
_PACKED = (".qweight", ".weight_packed")
# Models whose code transformers has under another name: Kimi-K2's authors give DeepSeek-V3's as theirs, and their own
# config.json's model_type only tells engines the two apart (docs/deploy_guidance.md beside the checkpoint).
SAME_MODEL = {"kimi_k2": "deepseek_v3"}
_CHOOSE = ("bias", "biases")  # buffers of routers; others are computed from config.json (MiniMax's decays)
_SCALES = ("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "scale", "scales")
_PLAIN = ("BF16", "F32", "F16", "I64", "I32", "BOOL")


class Placeholder(nn.Module):
    """Keeps a place for an expert-parallel layer.

    Attributes:
        checkpoint: the directory of its experts.
        names: those of the modules and parameters of the block that was there.
    """

    def __init__(self, checkpoint: Path, names: list[str]) -> None:
        super().__init__()
        self.checkpoint, self.names = checkpoint, names

    forward = refuse_to_run


def load_without_experts(path_or_hub_id: str | Path, *, model_class: type[Any] | None = None, **options: Any) -> Any:
    """Loads all but the MoE blocks by `from_pretrained`; `parallelize` then reads this rank's share. Not collective.

    Args:
        path_or_hub_id: a checkpoint directory (safetensors), or a model id of the Hugging Face hub.
        model_class: a model's class with its head, or an auto class; None takes the class that AutoModelForCausalLM
            would, else the one that the checkpoint names.
        options: `from_pretrained`'s: dtype, device_map, attn_implementation, revision, cache_dir, ... A float16
            checkpoint is loaded in bfloat16 unless `dtype` says otherwise.

    Returns:
        the model; calling it before `parallelize(model, world)` is a UsageError.

    Raises:
        CheckpointError: no such directory or model, its files aren't a checkpoint, or lack what lies outside of the
            experts. ConfigError: transformers has no class that generates text for it, or misses a library for its
            packed weights; its experts are packed and its family isn't in `eprt.models.FAMILIES`; an option that lets
            transformers read other files than the experts'.
    """
    directory = find_checkpoint(path_or_hub_id, **{name: options.pop(name) for name in _WHERE if name in options})
    directory /= options.pop("subfolder", None) or ""
    files = Checkpoint(directory)  # refuses what isn't a checkpoint
    files.close()
    _require_files_of_experts(options)
    if (said := flatten(files.config)).get("quantization_config") is not None:
        section(said, "quantization_config")  # else transformers breaks off
    config: Any = options.pop("config", None) or directory
    if isinstance(config, (str, Path)):
        config, options = _config_of(config, options)
    asked = options.get("dtype", options.get("torch_dtype", "auto"))
    if asked == "auto" and config.get_text_config().dtype == torch.float16:
        options["dtype"] = torch.bfloat16  # as `Checkpoint` reads the experts, and says
    kind = _class_of(config, model_class)
    config = _config_for(kind, config)
    if not has_family(config.to_dict()):
        if getattr(config, "quantization_config", None) is not None:
            raise ConfigError(f"{directory}: quantised experts of a {config.model_type}: expected bf16 or float32")
        lean = _emptied(directory, kind, lambda model: leave_out(model, directory))
        return _load(lean, directory, config, options)
    family = family_for(config.to_dict())
    numbers = family.moe_layers(config.to_dict())
    paths = [family.module_path(number) for number in numbers]
    if _packed_outside(files, family, numbers):
        _require_quantizer(config, files)
    elif getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # only the experts are packed: what is left is plain
    lean = _emptied(directory, kind, lambda model: _hold_places(model, paths, directory))
    return _load(lean, directory, config, options)


def _require_files_of_experts(options: dict[str, Any]) -> None:
    """Raises ConfigError for an option that lets transformers read other files than eprt reads the experts from."""
    asked = [name for name in _ELSEWHERE if options.get(name)]
    if options.get("use_safetensors") is False:
        asked.append("use_safetensors")
    if asked:
        raise ConfigError(
            f"{asked[0]}={shown(options[asked[0]])}: experts are read from model.safetensors (or its index) by their "
            "published names, and the rest has to be of the same files: leave it out, or save the model so"
        )


def _load(lean: type[Any], directory: Path, config: Any, options: dict[str, Any]) -> Any:
    """Calls `from_pretrained`. Raises ConfigError, or CheckpointError where transformers would go on with numbers that
    the files don't hold."""
    told, any_size = (options.pop(name, False) for name in ("output_loading_info", "ignore_mismatched_sizes"))
    asked = options | {"output_loading_info": True, "ignore_mismatched_sizes": True}
    head = f"{directory}: transformers can't load what lies outside of the experts: "
    try:
        model, found = lean.from_pretrained(directory, config=config, **asked)
    except EprtError:
        raise
    except ImportError as error:  # its quantizers need packages of their own
        raise ConfigError(head + _brief(error)) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(head + _brief(error)) from error
    if wrong := _made_up(model, found, any_size):
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise CheckpointError(
            f"{head}{wrong[0]}{more}; it would take wrong numbers: complete the files, or correct config.json (with "
            "its quantization_config)"
        )
    return (model, found) if told else model


def _made_up(model: nn.Module, found: dict[str, Any], any_size: bool) -> list[str]:
    """Returns what transformers filled with numbers of its own, or cast without its scale, by its loading report."""
    held = dict(model.named_parameters())
    if getattr(model, "hf_quantizer", None) is None:  # whose layers' buffers may begin with numbers that are right
        held |= {name: buffer for name, buffer in model.named_buffers() if name.endswith(_CHOOSE)}
    wrong = [f"{name} is missing" for name in sorted(found["missing_keys"]) if name in held]
    for name in sorted(found["unexpected_keys"]):
        module, _, suffix = name.rpartition(".")
        if suffix in _SCALES and f"{module}.weight" in held:
            wrong.append(f"{name} belongs to a weight that config.json says is plain")
    for name, shape, expected in () if any_size else sorted(found["mismatched_keys"]):
        wrong.append(f"{name} has shape {tuple(shape)}, expected {tuple(expected)} by config.json")
    return wrong


def _brief(error: Exception) -> str:
    return one_block(" ".join(f"{type(error).__name__}: {error}".split()), 300)


def _emptied(directory: Path, base: type[Any], empty: Callable[[Any], list[str]]) -> type[Any]:
    """Derives a model class which `empty` takes modules from as it is made; it returns their paths, whose tensors stay
    in the files."""

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        try:
            base.__init__(self, config, *args, **kwargs)  # `from_pretrained` does this on meta
        except Exception as error:  # of any type, by the field that is wrong
            raise CheckpointError(
                f"{directory}: transformers can't make a {base.__name__} by config.json: {_brief(error)}"
            ) from error
        paths = empty(self)
        ignored = [rf"^{re.escape(path)}\." for path in paths]
        # Quantizers leave alone what is named here: in place of experts they would put modules that are loaded whole.
        self._keep_in_fp32_modules = {*(self._keep_in_fp32_modules or ()), *paths}
        self._keys_to_ignore_on_load_unexpected = {*(self._keys_to_ignore_on_load_unexpected or ()), *ignored}

    members: dict[str, Any] = {"__init__": init, "__module__": base.__module__}
    why = "save_pretrained of a model that was loaded without its experts would write none: copy its checkpoint"
    members |= dict.fromkeys(("save_pretrained", "push_to_hub"), refusing(why))
    return type(base.__name__, (base,), members)


def _hold_places(model: Any, paths: list[str], directory: Path) -> list[str]:
    for path in paths:
        block = block_at(model, path)
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, Placeholder(directory, names_inside(path, block)))
    return paths


def names_inside(path: str, block: nn.Module) -> list[str]:
    """Returns the dotted names of a block's modules and parameters."""
    return [f"{path}.{name}" for found in (block.named_modules(), block.named_parameters()) for name, _ in found]


def block_at(model: nn.Module, path: str) -> nn.Module:
    """Returns a model's MoE block. Raises ConfigError."""
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise ConfigError(f"{type(model).__name__} has no module {path}: expected the model with its head") from error


def find_checkpoint(path_or_hub_id: str | Path, **where: Any) -> Path:
    """Returns the directory of a checkpoint: for a hub id its snapshot in the cache, downloaded if need be.

    Args:
        where: `huggingface_hub.snapshot_download`'s revision, cache_dir, token, local_files_only, force_download.

    Raises:
        CheckpointError: neither a directory nor a hub id whose files can be had.
    """
    require_kinds(find_checkpoint, locals())
    path = Path(path_or_hub_id)
    if os.path.exists(path):  # what is no checkpoint is refused where it is opened
        return path
    if not _HUB_ID.fullmatch(str(path_or_hub_id)):
        raise CheckpointError(f"{path}: no such directory")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]
    try:
        return Path(snapshot_download(str(path_or_hub_id), allow_patterns=patterns, ignore_patterns=["*/*"], **where))
    except (OSError, ValueError) as error:
        why = one_block(" ".join(str(error).split()), 300)
        raise CheckpointError(f"{path}: no such directory, and no model to be had from the hub: {why}") from error


def _config_of(place: str | Path, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the config, with those `options` that are its fields, and the others. Raises CheckpointError."""
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    models = {name: options[name] for name in _MODELS if name in options}
    fields = {name: value for name, value in options.items() if name not in _MODELS}
    try:
        said, rest = PretrainedConfig.get_config_dict(place, **fields)
        if (kind := SAME_MODEL.get(str(said.get("model_type")))) is None or fields.get("trust_remote_code"):
            found: Any = AutoConfig.from_pretrained(place, return_unused_kwargs=True, **fields)
        else:
            found = CONFIG_MAPPING[kind].from_dict({**said, "model_type": kind}, return_unused_kwargs=True, **rest)
    except Exception as error:  # of any type, by the field that is wrong
        raise CheckpointError(f"{place}: transformers can't read its config.json: {_brief(error)}") from error
    return found[0], found[1] | models


def _class_of(config: Any, asked: Any) -> type[Any]:
    """Returns the class that is asked for, an auto class's choice; None: AutoModelForCausalLM's, else the one that the
    checkpoint names. Raises ConfigError."""
    import transformers

    auto: Any = asked or transformers.AutoModelForCausalLM
    mapping = getattr(auto, "_model_mapping", None)
    if mapping is None:
        return asked
    if type(config) in mapping:
        found = mapping[type(config)]
        return _taking(config, found[0] if isinstance(found, tuple) else found)
    for name in () if asked else config.architectures or ():
        if (named := getattr(transformers, name, None)) is not None:
            return _taking(config, named)
    raise ConfigError(f"{auto.__name__} has no class for a {config.model_type}: pass model_class=")


def _taking(config: Any, kind: Any) -> type[Any]:
    """Returns a class of transformers, which are found by their configs' names. Raises ConfigError for a config of that
    name from a checkpoint's own code."""
    if type(config).__module__.startswith("transformers_modules.") and not isinstance(config, kind.config_class):
        raise ConfigError(
            f"transformers' {kind.__name__} takes no {type(config).__name__} of the checkpoint's own code: leave "
            "trust_remote_code out, or pass the checkpoint's own class as model_class="
        )
    return kind


def _config_for(kind: type[Any], config: Any) -> Any:
    """Returns the part of the config that the class takes (of a text model, or of Qwen3-Omni's thinker), as
    `from_pretrained` does."""
    parts: dict[str, Any] = getattr(config, "sub_configs", {})
    part = next((name for name, section in parts.items() if section is getattr(kind, "config_class", None)), None)
    if part is None:
        return config
    inner, quant = getattr(config, part), getattr(config, "quantization_config", None)
    if quant is not None:
        inner.quantization_config = quant
    return inner


def _require_quantizer(config: Any, files: Checkpoint) -> None:
    """Raises ConfigError where transformers would take packed weights as they are, without their scales."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as KNOWN

    quant = flatten(files.config).get("quantization_config")
    method = quant.get("quant_method") if isinstance(quant, dict) else None
    if quant is not None and (method not in KNOWN or getattr(config, "quantization_config", None) is None):
        raise ConfigError(
            f"{files.directory}: weights outside of the experts are packed by {shown(method)}, which transformers "
            "doesn't read: take a checkpoint of which only the experts are packed, or a plain one"
        )


def _packed_outside(files: Checkpoint, family: ModelFamily, numbers: list[int]) -> bool:
    """Returns whether anything but the MoE blocks is packed, and so needs transformers' own quantizer."""
    inside = tuple(f"{block.format(number)}." for block in family.blocks for number in numbers)
    return any(
        info.dtype not in _PLAIN or name.endswith(_PACKED)
        for name, info in files.manifest.items()
        if not name.startswith(inside)
    )
