"""Adapters (LoRA, say) that PEFT put around a model's modules: eprt keeps those of modules that stay."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from eprt.errors import ConfigError

# What PEFT calls the module that an adapter changes, or has a trained copy of (`modules_to_save`), in its wrapper.
_WRAPPED = re.compile(r"(.*?)\.(base_layer|original_module)(\.|$)")


def without_wrapper(model: nn.Module) -> nn.Module:
    """Returns the model inside of a `PeftModel`, any other model as it is."""
    inner = getattr(model, "get_base_model", None)
    return model if inner is None else inner()


def require_none_inside(model: nn.Module, held: Iterable[str], left_out: Iterable[str]) -> None:
    """Raises ConfigError if an adapter changes what eprt takes the place of, and so would be lost.

    Args:
        held: dotted names of the modules and parameters that eprt takes the place of.
        left_out: the same of those that were never loaded, around which PEFT would have put what their configs name.
    """
    adapters: dict[str, Any] = getattr(model, "peft_config", None) or {}
    found = next((wrapped[1] for name in held if (wrapped := _WRAPPED.match(name))), None)
    if found is None:
        found = next((name for name in left_out if any(_aims_at(each, name) for each in adapters.values())), None)
    if found is not None:
        raise ConfigError(
            f"an adapter ({', '.join(adapters)}) changes {found}, which eprt would run "
            "without it: merge it into a model that has its experts (merge_and_unload), and take that one, or the "
            "checkpoint that it saves"
        )


def _aims_at(config: Any, name: str) -> bool:
    """Returns whether PEFT, by a config's fields, puts the adapter around a module or parameter of that name."""
    if any(name.endswith(ending) for ending in getattr(config, "modules_to_save", None) or ()):
        return True
    by_modules = _names(config, "target_modules", name) and not _names(config, "exclude_modules", name)
    return by_modules or _names(config, "target_parameters", name)


def _names(config: Any, field: str, name: str) -> bool:
    targets: Any = getattr(config, field, None) or ()
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)
