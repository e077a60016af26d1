"""Options of transformers' generation, which come from a call, a config that is given, or the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def option_of(model: Any, options: Mapping[str, Any], name: str) -> Any:
    """Returns what `model.generate` will take: an option, None included, else the first config that has it."""
    if name in options:
        return options[name]
    values = (getattr(config, name, None) for config in (options.get("generation_config"), model.generation_config))
    return next((value for value in values if value is not None), None)
