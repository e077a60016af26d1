"""Reads `quantization_config`: in which number format a module's matrices are stored, and in whose way of packing.

Sources: ModelOpt's unified checkpoints; the compressed-tensors package (formats `pack-quantized`, `float-quantized`,
`nvfp4-pack-quantized`, `mxfp4-pack-quantized`, `mxfp8-quantized`); GPTQModel's, AutoAWQ's and AutoRound's settings.
Nothing here reads a tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch

from eprt.config import WeightFormat
from eprt.errors import ConfigError
from eprt.json_files import shown
from eprt.models.hf_config import HfConfig, boolean, choice, expect, integer, listed, model_dtype, section, where
from eprt.models.patterns import EXPRESSION, Modules, first_match, left_out, require_few
from eprt.quant.elements import COLUMNS_AS_THEY_ARE, COLUMNS_SORTED
from eprt.weights import FP8_BLOCK, INT4_GROUPS, MX_BLOCK, NVFP4_BLOCK

MOST_MATCHES = 20_000  # regular expressions times experts, of one layer
_EVERY = "Linear"

# NVIDIA ModelOpt's `quant_algo` (modelopt.torch.export, unified Hugging Face checkpoints).
_MODELOPT_FORMATS: dict[str, WeightFormat] = {
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "FP8": "fp8_tensor",
    "FP8_PB_WO": "fp8_block",
    "FP8_BLOCK_SCALES": "fp8_block",  # TensorRT-LLM's name for it
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8_channel",
    "MXFP8": "mxfp8",
}
_ALSO = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # published and transformers' names of one matrix
_FUSED = ("gate_up_proj", "up_proj", "down_proj")  # all experts' matrices, as transformers' modules hold them


@dataclass(frozen=True)
class Scheme:
    """Describes how matrices are stored in files.

    Attributes:
        packer: whose names and packing they have; "own" are those of ModelOpt, DeepSeek and gpt-oss.
        group: columns that share a scale and zero point of INT4; 0 is the whole row.
        zeros: whether zero points are read; else all are 8.
        zero_offset: what stored zero points lack (1 in GPTQ v1).
        ordered: columns may lie in another order than their groups, which a `g_idx` says.
    """

    format: WeightFormat
    packer: Literal["own", "compressed-tensors", "gptq", "awq"] = "own"
    group: int = 0
    zeros: bool = False
    zero_offset: int = 0
    ordered: bool = False


def scheme_of(hf: dict[str, Any], modules: Modules, num_experts: int = 1) -> Scheme:
    """Returns how the routed experts are stored: by `quantization_config`, else by the dtype.

    Args:
        modules: names that per-module settings may know the first expert by; those of one projection end alike, or as
            `_ALSO` says.
        num_experts: how many experts are compared with the first.

    Raises:
        ConfigError: a quantisation that no matrix type of eprt.weights holds, or projections or experts that differ in
            theirs.
    """
    first = _scheme_of(hf, modules)
    for expert in _compared(hf, num_experts) if hf.get("quantization_config") else ():
        names = tuple(module.replace(".experts.0.", f".experts.{expert}.") for module in modules)
        _require_one(hf, {shown(modules[0]): first, shown(names[0]): _scheme_of(hf, names)})
    return first


def _compared(hf: dict[str, Any], num_experts: int) -> Iterable[int]:
    """Returns the experts that are compared with the first: all, where that takes bounded time. Where it doesn't, the
    others' tensors still have to be those of the first one's scheme."""
    quant = section(hf, "quantization_config")
    keyed = [quant[field] for field in ("dynamic", "extra_config") if isinstance(quant.get(field), dict)]
    patterns = json.dumps(quant).count('"re:') + sum(map(len, map(_expressions, keyed)))
    return range(1, num_experts) if patterns * num_experts <= MOST_MATCHES else (num_experts - 1,)


def _scheme_of(hf: dict[str, Any], modules: Modules) -> Scheme:
    if hf.get("quantization_config") is None:
        return _plain(hf)
    quant = section(hf, "quantization_config")
    return DIALECTS[choice(_dialect(quant), "quant_method", DIALECTS)](hf, quant, modules)


def _dialect(quant: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings with the one name of `quant_method` that `DIALECTS` has for several."""
    producer = quant.get("producer")
    if quant.get("quant_method") is None and isinstance(producer, dict) and producer.get("name") == "modelopt":
        return HfConfig(quant | {"quant_method": "modelopt"}, where(quant))  # hf_quant_config.json's text, copied
    quant = _spelled(quant, "quant_method", lambda method: method.lower().replace("_", "-"))
    return _spelled(quant, "quant_method", lambda method: "modelopt" if method.startswith("modelopt-") else method)


def _spelled(settings: dict[str, Any], name: str, spell: Callable[[str], str]) -> dict[str, Any]:
    """Returns settings with one text of theirs spelled as it is here."""
    found = settings.get(name)
    return HfConfig(settings | {name: spell(found)}, where(settings)) if isinstance(found, str) else settings


def _plain(hf: dict[str, Any]) -> Scheme:
    return Scheme("f32" if model_dtype(hf) == torch.float32 else "bf16")


def _fp8(hf: dict[str, Any], quant: dict[str, Any], modules: Modules) -> Scheme:
    if (quant.get("expert_dtype") or hf.get("expert_dtype")) == "fp4":
        packed = Scheme("mxfp4")
    else:
        expect(quant, "weight_block_size", [128, 128])
        packed = Scheme("fp8_block" if quant.get("weight_block_size") else "fp8_tensor")
    return _but_for(hf, quant, modules, ("modules_to_not_convert", "ignored_layers"), packed)


def _but_for(hf: dict[str, Any], quant: dict[str, Any], modules: Modules, lists: Modules, packed: Scheme) -> Scheme:
    left = [name for field in lists for name in listed(quant, field, str) or []]
    return _one_scheme(hf, lambda names: _plain(hf) if left_out(names, left) else packed, modules)


def _modelopt(hf: dict[str, Any], quant: dict[str, Any], modules: Modules) -> Scheme:
    quant = section(quant, "quantization") if "quantization" in quant else quant
    excluded = [*(listed(quant, "ignore", str) or []), *(listed(quant, "exclude_modules", str) or [])]
    plain = _plain(hf)
    patterns = [pattern for pattern in excluded if any(c in pattern for c in "*?[")]
    require_few(patterns, "excluded patterns", where(quant))
    if quant.get("quant_algo") is None and (quant.get("kv_cache_quant_algo") or quant.get("kv_cache_scheme")):
        return plain  # the cache alone is quantised
    mixed = _spelled(quant, "quant_algo", str.upper).get("quant_algo") == "MIXED_PRECISION"
    layers = section(quant, "quantized_layers") if mixed else {}

    def scheme(names: Modules) -> Scheme:
        if left_out(names, excluded) or any(fnmatchcase(name, p) for name in names for p in patterns):
            return plain
        if not mixed:
            return _modelopt_scheme(quant)
        found = {key: _modelopt_scheme(section(layers, key)) for key in _mixed_keys(layers, names)}
        _require_one(hf, found)
        return next(iter(found.values()), plain)

    return _one_scheme(hf, scheme, modules)


def _mixed_keys(layers: dict[str, Any], names: Modules) -> list[str]:
    """Returns the keys of ModelOpt's `quantized_layers` that say how a module is stored: its own name, else those of
    the experts' fused matrices, else the nearest module's around it."""
    near = {name.rsplit(".", up)[0] for name in names for up in range(name.count(".") + 1)}
    fused = {f"{name}.{matrix}" for name in names if name.endswith(".experts") for matrix in _FUSED}
    found = sorted(layers.keys() & (near | fused))
    deepest = max((key.count(".") for key in found), default=0)
    return [key for key in found if key.count(".") == deepest]


def _modelopt_scheme(settings: dict[str, Any]) -> Scheme:
    settings = _spelled(settings, "quant_algo", str.upper)
    format = _MODELOPT_FORMATS[choice(settings, "quant_algo", _MODELOPT_FORMATS)]
    if format == "fp8_block":
        expect(settings, "group_size", FP8_BLOCK)
    return Scheme(format)


# ---- compressed-tensors ---------------------------------------------------------------------------------------------


def _compressed(hf: dict[str, Any], quant: dict[str, Any], modules: Modules) -> Scheme:
    _refuse_transforms(quant)
    ignored = listed(quant, "ignore", str) or []
    groups = section(quant, "config_groups")
    named = [section(groups, name) for name in groups]
    targets = [(group, listed(group, "targets", str) or []) for group in named]

    def scheme(names: Modules) -> Scheme:
        if first_match(names, ignored, where(quant)) is not None:
            return _plain(hf)
        found: dict[str, dict[str, Any]] = {}
        for group, of_group in targets:
            target = first_match(names, of_group, where(groups)) or _EVERY
            found |= {target: group} if target in of_group else {}
        if not found:
            return _plain(hf)
        first = min(found, key=lambda target: (target == _EVERY, target.startswith(EXPRESSION), target))
        return _compressed_scheme(found[first], quant)

    return _one_scheme(hf, scheme, modules)


def _refuse_transforms(quant: dict[str, Any]) -> None:
    """Raises ConfigError for what changes a linear layer's maths, or its storage, beyond its own numbers."""
    transforms = quant.get("transform_config")
    if transforms and transforms != {"config_groups": {}}:
        raise ConfigError(f"{where(quant)}: transform_config is not supported: expected none, weights as they are")
    sparsity = quant.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise ConfigError(f"{where(quant)}: sparsity_config.format {shown(sparsity['format'])}: expected dense")


def _compressed_scheme(group: dict[str, Any], quant: dict[str, Any]) -> Scheme:
    readers = {
        "pack-quantized": _pack_quantized,
        "float-quantized": _float_quantized,
        "naive-quantized": _float_quantized,
        "nvfp4-pack-quantized": partial(_block_quantized, format="nvfp4", bits=4, block=NVFP4_BLOCK),
        "mxfp4-pack-quantized": partial(_block_quantized, format="mxfp4", bits=4, block=MX_BLOCK),
        "mxfp8-quantized": partial(_block_quantized, format="mxfp8", bits=8, block=MX_BLOCK),
    }
    stored = choice(group if group.get("format") else quant, "format", readers)
    return replace(readers[stored](section(group, "weights")), packer="compressed-tensors")


def _pack_quantized(weights: dict[str, Any]) -> Scheme:
    _expect_number(weights, "int", 4)
    strategy = choice(_spelled(weights, "strategy", str.lower), "strategy", ("group", "channel"))
    order = weights.get("actorder")
    if order not in (*COLUMNS_AS_THEY_ARE, *COLUMNS_SORTED):
        raise ConfigError(f"{where(weights)}: actorder {shown(order)} is not supported: expected static, group or none")
    group = int4_group(weights) if strategy == "group" else 0
    zeros = not boolean(weights, "symmetric", True)
    return Scheme("int4", group=group, zeros=zeros, ordered=order in COLUMNS_SORTED)


def _float_quantized(weights: dict[str, Any]) -> Scheme:
    _expect_number(weights, "float", 8)
    formats: dict[str, WeightFormat] = {"tensor": "fp8_tensor", "channel": "fp8_channel", "block": "fp8_block"}
    strategy = choice(_spelled(weights, "strategy", str.lower), "strategy", formats)
    if strategy == "block" and weights.get("block_structure") not in ([128, 128], "128x128"):
        found = shown(weights.get("block_structure"))
        raise ConfigError(f"{where(weights)}: block_structure {found} is not supported: expected [128, 128]")
    return Scheme(formats[strategy])


def _block_quantized(weights: dict[str, Any], format: WeightFormat, bits: int, block: int) -> Scheme:
    _expect_number(weights, "float", bits)
    expect(weights, "group_size", block)
    return Scheme(format)


def _expect_number(weights: dict[str, Any], kind: str, bits: int) -> None:
    found = weights.get("type"), weights.get("num_bits")
    if found != (kind, bits):
        said = f"type {shown(found[0])} of num_bits {shown(found[1])}"
        raise ConfigError(f"{where(weights)}: {said} is not supported in this format: expected {kind} of {bits}")


# ---- GPTQ, AWQ and AutoRound ----------------------------------------------------------------------------------------


def _gptq(hf: dict[str, Any], quant: dict[str, Any], modules: Modules) -> Scheme:
    said = "checkpoint_format" if quant.get("checkpoint_format") else "format"  # which is its newer name
    stored = choice(quant, said, ("gptq", "gptq_v2"), default="gptq")
    expect(quant, "pack_dtype", "int32")

    def scheme(names: Modules) -> Scheme:
        settings = _ruled(quant, names)
        if settings is None:
            return _plain(hf)
        _expect_bits(settings, "bits")
        zeros, ordered = not boolean(settings, "sym", True), boolean(settings, "desc_act", False)
        return Scheme("int4", "gptq", int4_group(settings), zeros, int(stored == "gptq"), ordered)

    return _one_scheme(hf, scheme, modules)


def _awq(hf: dict[str, Any], quant: dict[str, Any], modules: Modules) -> Scheme:
    version = quant.get("version") or "gemm"
    if not isinstance(version, str) or version.lower() != "gemm":
        raise ConfigError(f"{where(quant)}: version {shown(version)} is not supported: expected gemm")
    left = listed(quant, "modules_to_not_convert", str) or []

    def scheme(names: Modules) -> Scheme:
        settings = None if left_out(names, left) else _ruled(quant, names)
        if settings is None:
            return _plain(hf)
        _expect_bits(settings, "bits" if "bits" in settings else "w_bit")
        return Scheme("int4", "awq", int4_group(settings), zeros=True)

    return _one_scheme(hf, scheme, modules)


def _auto_round(hf: dict[str, Any], quant: dict[str, Any], modules: Modules) -> Scheme:
    """Packs as GPTQ's first version or AWQ do."""
    choice(quant, "data_type", ("int",), default="int")
    gptq, awq = "auto_round:auto_gptq", "auto_round:auto_awq"
    packed = choice(quant, "packing_format", (gptq, awq), default=gptq)
    extra = section(quant, "extra_config") if quant.get("extra_config") else {}
    named = quant.get("block_name_to_quantize")
    blocks = tuple(named.split(",") if isinstance(named, str) else listed(quant, "block_name_to_quantize", str) or [])
    expressions = _expressions(extra)
    require_few(expressions, "regular expressions", where(extra))

    def scheme(names: Modules) -> Scheme:
        rule = _extra_rule(extra, expressions, names)
        inside = not blocks or any(name.startswith(blocks) for name in names)
        settings = HfConfig(quant | (rule or {}), where(quant if rule is None else rule))
        bits = integer(settings, "bits")
        if bits >= 16 or not (inside or (rule or {}).get("bits")):
            return _plain(hf)
        _expect_bits(settings, "bits")
        group = int4_group(settings)
        if packed == awq:
            return Scheme("int4", "awq", group, zeros=True)
        return Scheme("int4", "gptq", group, not boolean(settings, "sym", True), zero_offset=1)

    return _one_scheme(hf, scheme, modules)


def _expressions(rules: dict[str, Any]) -> list[str]:
    """Returns the keys that are regular expressions, not names."""
    return [key for key in rules if not key.replace(".", "").replace("-", "").isidentifier()]


def _extra_rule(extra: dict[str, Any], expressions: list[str], names: Modules) -> dict[str, Any] | None:
    """Returns what AutoRound's `extra_config` says of a module: by its name, the end of it, or the first expression
    that is found in it."""
    parts = [name.split(".") for name in names]
    for start in range(max(map(len, parts))):
        if said := next((key for part in parts if (key := ".".join(part[start:])) in extra), None):
            return section(extra, said)
    for key in expressions:
        anywhere = f"{EXPRESSION}{'' if key.startswith('.*') else '.*'}(?:{key})"
        if first_match(names, [anywhere], where(extra)) is not None:
            return section(extra, key)
    return None


def _ruled(quant: dict[str, Any], names: Modules) -> dict[str, Any] | None:
    """Returns the settings of a module, changed by the first of GPTQModel's `dynamic` rules that matches; None where
    that leaves it unquantised."""
    rules = section(quant, "dynamic") if quant.get("dynamic") else {}
    for rule in rules:
        if first_match(names, ["re:" + rule.removeprefix("+:").removeprefix("-:")], where(rules)) is not None:
            return None if rule.startswith("-:") else HfConfig(quant | section(rules, rule), where(quant))
    return quant


def _expect_bits(quant: dict[str, Any], name: str) -> None:
    if (bits := integer(quant, name)) != 4:
        raise ConfigError(f"{where(quant)}: {name} {bits} is not supported: expected 4")


def int4_group(settings: dict[str, Any]) -> int:
    """Returns `group_size`, 0 for the whole row. Raises ConfigError for one that INT4 matrices haven't got."""
    name = "group_size" if "group_size" in settings else "q_group_size"
    found = integer(settings, name, default=-1, least=-1)
    if found not in (-1, *INT4_GROUPS):
        raise ConfigError(
            f"{where(settings)}: {name} {found} is not supported: expected {', '.join(map(str, INT4_GROUPS))} or -1"
        )
    return max(found, 0)


def _one_scheme(hf: dict[str, Any], scheme: Callable[[Modules], Scheme], modules: Modules) -> Scheme:
    """Returns what holds for every projection of the experts. Raises ConfigError where they differ."""
    projections: dict[str, list[str]] = {}
    for module in modules:
        name = module.rpartition(".")[2]
        projections.setdefault(_ALSO.get(name, name), []).append(module)
    around = projections.pop("experts", []) if len(projections) > 1 else []
    found = {names[0].rpartition(".")[2]: scheme((*names, *around)) for names in projections.values()}
    _require_one(hf, found)
    return next(iter(found.values()))


def _require_one(hf: dict[str, Any], found: dict[str, Scheme]) -> None:
    if len(set(found.values())) > 1:
        said = ", ".join(f"{name} {_said(one)}" for name, one in found.items())
        raise ConfigError(f"{where(hf)}: experts of one layer are quantised in several ways: {said}; expected one")


def _said(scheme: Scheme) -> str:
    if scheme.format != "int4":
        return scheme.format
    said = [f"groups of {scheme.group}" if scheme.group else "whole rows"]
    said += ["zero points"] * scheme.zeros + ["activation order"] * scheme.ordered
    return f"int4 ({', '.join(said)})"


# quant_method -> scheme, from the config, its quantization_config and the names of the experts' modules.
DIALECTS: dict[str, Callable[[dict[str, Any], dict[str, Any], Modules], Scheme]] = {
    "mxfp4": partial(_but_for, lists=("modules_to_not_convert",), packed=Scheme("mxfp4")),
    "fp8": _fp8,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
}
