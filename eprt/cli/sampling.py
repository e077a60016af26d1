"""Turns flags of `eprt generate` into options of transformers, beside the checkpoint's own generation config."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eprt.cli.arguments import Generation
from eprt.errors import CheckpointError, ConfigError, one_block

if TYPE_CHECKING:
    from transformers import GenerationConfig

_NEW_TOKENS = 32  # where neither a flag nor the checkpoint says it
_LIMITS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (lambda value: value >= 1, "at least 1"),
    # The bounds of scores that are divided: below, float32 overflows.
    "temperature": (lambda value: value == 0 or value >= 0.001, "0 (greedy) or at least 0.001, and finite"),
    "top_p": (lambda value: 0 < value <= 1, "above 0, at most 1 (all tokens)"),
    "top_k": (lambda value: value >= 0, "at least 0 (all tokens)"),
    "min_p": (lambda value: 0 <= value <= 1, "0 to 1"),
    "repetition_penalty": (lambda value: 0.01 <= value <= 100, "0.01 to 100 (1 is none)"),
    "stop_strings": (all, "text"),
}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")  # each of them asks for sampling


def given_flags(arguments: Generation) -> dict[str, Any]:
    """Returns all flags by their names, None where one isn't given, as JSON has them. Raises ConfigError."""
    found: dict[str, Any] = {field.name: getattr(arguments, field.name) for field in fields(Generation)}
    found = {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
    for name, (allowed, said) in _LIMITS.items():
        value = found[name]
        if value is not None and not ((not isinstance(value, float) or math.isfinite(value)) and allowed(value)):
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be {said}")
    return found


def generation_options(arguments: Generation, config: GenerationConfig) -> dict[str, Any]:
    """Returns the options that differ from the checkpoint's `config`, for `model.generate`. Raises ConfigError."""
    options = {name: value for name, value in given_flags(arguments).items() if value not in (None, [])}
    if options.get("temperature") == 0:
        options = {name: value for name, value in options.items() if name not in _SAMPLING} | {"do_sample": False}
    elif any(name in options for name in _SAMPLING):
        options["do_sample"] = True
    if config.max_new_tokens is None and config.max_length is None:
        options.setdefault("max_new_tokens", _NEW_TOKENS)
    return options


def checkpoints_generation(directory: Path) -> GenerationConfig:
    """Returns what a checkpoint's generation_config.json says; transformers' defaults without one. Raises
    CheckpointError."""
    from transformers import GenerationConfig

    path = directory / "generation_config.json"
    if not path.is_file():
        return GenerationConfig()
    try:
        return GenerationConfig.from_pretrained(str(directory))
    except Exception as error:
        why = one_block(" ".join(f"{type(error).__name__}: {error}".split()), 300)
        raise CheckpointError(f"{path}: can't be read: {why}") from error
