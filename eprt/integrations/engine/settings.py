"""Options of a plugin, and the placement and the plan that fit them and the engine.

Everything read here is the same on every rank, so every rank decides alike.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig, WeightFormat
from eprt.errors import ConfigError, UnsupportedError
from eprt.experts import EXECUTORS
from eprt.graphs.recording import refusal_of
from eprt.integrations.engine.parameters import FallsBackToEngine
from eprt.placement import ExpertPlacement
from eprt.placement.file import PlacementFile
from eprt.plan import Plan, make_plan
from eprt.support import Device

PLACEMENT = "placement"  # beside RuntimeConfig's fields: the path of a placement file
STRICT = "strict"  # beside RuntimeConfig's fields: layers that would fall back are errors
_FIELDS = {field.name for field in fields(RuntimeConfig)} - {"max_tokens_per_rank", "on_rank_lost"}
_TOKENS = (torch.bfloat16, torch.float16, torch.float32)
# Projections of attention, as the engines' models name them.
_ATTENTION = {
    *("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "out_proj", "qkv", "wqkv", "wo"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "fused_qkv_a_proj"),
}
SCALE_BLOCK = {"mxfp4": 32, "mxfp8": 32, "nvfp4": 16, "fp8_block": 128}  # inputs that share a scale


def fall_back(reasons: list[tuple[bool, str]]) -> None:
    """Raises FallsBackToEngine with the first reason that holds, if any."""
    if reason := next((reason for holds, reason in reasons if holds), ""):
        raise FallsBackToEngine(reason)


def on_input(given: bool, top_k: int, method: Any) -> list[tuple[bool, str]]:
    """Returns what keeps a layer from eprt whose router weights are `given` to the experts' inputs, for `fall_back`."""
    kind = type(method).__name__
    return [
        (given and top_k > 1, f"router weights on the experts' input with top_k {top_k}: must be 1"),
        (
            given and kind.startswith("ModelOpt"),
            f"router weights on the input of {kind}, whose scales come past loaders",
        ),
    ]


ADAPTERS = (
    "--enable-lora: adapters of the experts live in {}'s own kernels; --lora-target-modules that names projections of "
    "attention alone leaves the experts to eprt"
)


def adapts_attention(targets: Iterable[str] | None) -> bool:
    """Returns whether LoRA is kept off the experts by `--lora-target-modules`, the ends of modules' names."""
    return bool(named := set(targets or ())) and named <= _ATTENTION


def require_whole_scales(found: WeightFormat, part: int, tp_size: int, tokens: torch.dtype) -> None:
    """Checks a layer's tensor-parallel part and its tokens. Raises FallsBackToEngine.

    Args:
        part: intermediate size that is left to a rank.
        tokens: the dtype of hidden states.
    """
    block = SCALE_BLOCK.get(found, 1)
    cut = f"tensor parallelism {tp_size} leaves {part} of the experts' rows to a rank, which cuts a scale of"
    reasons = [
        (tp_size > 1 and part % block != 0, f"{cut} {block} ({found})"),
        (tokens not in _TOKENS, f"tokens in {tokens}: eprt takes bfloat16, float16 or float32"),
    ]
    fall_back(reasons)


def checked_options(given: Any, where: str, own: str) -> dict[str, Any]:
    """Returns a plugin's options as given in `where`; `own` is one that only this engine's has. Raises ConfigError for
    names that it hasn't got."""
    found = sorted(set(given) - {*_FIELDS, PLACEMENT, STRICT, own}) if isinstance(given, dict) else given
    if found or not isinstance(given, dict):
        raise ConfigError(
            f"{where}: {found}; expected {PLACEMENT}, {STRICT}, {own}, or fields of RuntimeConfig: {sorted(_FIELDS)}"
        )
    if not isinstance(strict := given.get(STRICT, False), bool):
        raise ConfigError(f"{where}.{STRICT}: {strict!r}: expected true or false")
    if not isinstance(path := given.get(PLACEMENT, ""), str):
        raise ConfigError(f"{where}.{PLACEMENT}: {path!r}: expected the path of a placement file")
    return given


def runtime_with(options: Mapping[str, Any], max_tokens_per_rank: int) -> RuntimeConfig:
    """Returns settings with the engine's own limit as capacity, the rest from the options. Raises ConfigError."""
    given = {name: value for name, value in options.items() if name in _FIELDS}
    return RuntimeConfig(max_tokens_per_rank=max_tokens_per_rank, **given)


@functools.cache
def read_placements(path: str) -> PlacementFile:
    return PlacementFile.read(Path(path).expanduser())


def placement_of(
    options: Mapping[str, Any], name: str, num_experts: int, parallel: ParallelConfig
) -> ExpertPlacement | None:
    """Returns the placement of the layer that the engine calls `name`, or None if the options name no file.

    Raises:
        ConfigError: there is no such file, it is for other sizes, or it lacks this layer.
    """
    path = options.get(PLACEMENT)
    if path is None:
        return None
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)  # 3 of `model.layers.3.mlp.experts`
    if len(numbers) != 1:
        raise ConfigError(
            f"layer {name!r} has {len(numbers)} numbers in its name: a placement file can't say which it is"
        )
    return read_placements(path).placement(int(numbers[0]), num_experts, parallel)


def with_low_precision(moe: MoEConfig, runtime: RuntimeConfig, options: Mapping[str, Any]) -> RuntimeConfig:
    """Quantises activations to FP8 where the weights are FP8: with one scale for 128 values beside blocks, else for a
    token.

    The engines' own kernels do so with such a checkpoint. The options may say otherwise.
    """
    if moe.weight_format not in ("fp8_block", "fp8_channel", "fp8_tensor") or "low_precision_activations" in options:
        return runtime
    return replace(runtime, low_precision_activations=True)


def choose(
    moe: MoEConfig,
    parallel: ParallelConfig,
    runtime: RuntimeConfig,
    device: Device,
    placement: ExpertPlacement | None = None,
    *,
    captured: bool,
    eager_flag: str = "--enforce-eager",
) -> tuple[Plan, RuntimeConfig]:
    """Returns the plan, and settings that name its backends. Raises FallsBackToEngine, ConfigError.

    Args:
        captured: the engine may capture the layer in CUDA graphs, which not every backend survives.
        eager_flag: the engine's flag against that, for messages.
    """
    try:
        plan = make_plan(moe, parallel, runtime, device, placement)
    except UnsupportedError as error:
        raise FallsBackToEngine(str(error)) from error
    if captured and (why := refusal_of(plan)):
        pairs = [pair for pair in plan.candidates if pair.support and not refusal_of(pair)]
        if not pairs:
            raise FallsBackToEngine(
                f"{plan.dispatcher} + {plan.executor} can't be captured in CUDA graphs ({why}), and nothing else can "
                f"run this layer: {eager_flag} gives it to eprt"
            )
        best = min(pairs, key=lambda pair: pair.executor != plan.executor)
        named = replace(runtime, dispatcher=best.dispatcher, executor=best.executor)
        plan = make_plan(moe, parallel, named, device, placement)
    if device.kind == "cuda" and runtime.executor == "auto":
        _require_packed(plan.executor, moe, parallel, runtime, device)
    return plan, replace(runtime, dispatcher=plan.dispatcher, executor=plan.executor)


def _require_packed(
    executor: str, moe: MoEConfig, parallel: ParallelConfig, runtime: RuntimeConfig, device: Device
) -> None:
    """Raises FallsBackToEngine if the executor would decode packed experts, with why no other can multiply them."""
    if moe.weight_format in EXECUTORS[executor].weights:
        return
    others = [spec for spec in EXECUTORS.values() if moe.weight_format in spec.weights and spec.name != "reference"]
    payload = runtime.payload or "bf16"
    reasons = [f"{e.name}: {e.supports(moe, parallel, runtime, device, payload).reason}" for e in others]
    raise FallsBackToEngine(f"eprt would decode its {moe.weight_format} experts to bf16 ({'; '.join(reasons)})")
