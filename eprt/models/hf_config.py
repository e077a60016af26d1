"""Reads single fields of a Hugging Face config.json. Nothing of it is executed; every complaint names the field."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, TypeVar

import torch

from eprt.errors import ConfigError
from eprt.json_files import shown

T = TypeVar("T")
# No executor computes in float16: such weights are rounded to bfloat16 as they are read.
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.bfloat16}


class HfConfig(dict[str, Any]):
    """The fields of a config, with the name of its file, which begins every complaint."""

    def __init__(self, fields: dict[str, Any], where: str) -> None:
        super().__init__(fields)
        self.where = where


def where(hf: dict[str, Any]) -> str:
    """Returns the file that `hf` was read from, as far as that is known."""
    return hf.where if isinstance(hf, HfConfig) else "config.json"


MAX_LAYERS = 10_000  # far above any model: keeps a hostile config from asking for a list of 10**12


def integer(hf: dict[str, Any], *names: str, default: int | None = None, least: int = 0) -> int:
    """Returns the first of `names` that is set. Raises ConfigError unless it is an integer of at least `least`."""
    value = _number(hf, names, default, (int,), "an integer")
    if value < least:
        raise ConfigError(f"{where(hf)}: {names[0]} is {value}: expected at least {least}")
    return value


def real(hf: dict[str, Any], *names: str, default: float | None = None) -> float:
    """Returns the same as `integer`, for any finite number."""
    value = float(_number(hf, names, default, (int, float), "a number"))  # integers have 64 bits at most
    if not math.isfinite(value):
        raise ConfigError(f"{where(hf)}: {names[0]} is {value}: expected a finite number")
    return value


def num_layers(hf: dict[str, Any]) -> int:
    """Returns `num_hidden_layers`. Raises ConfigError."""
    value = integer(hf, "num_hidden_layers", least=1)
    if value > MAX_LAYERS:
        raise ConfigError(f"{where(hf)}: num_hidden_layers is {value}: expected at most {MAX_LAYERS}")
    return value


def boolean(hf: dict[str, Any], name: str, default: bool) -> bool:
    """Returns a boolean. Raises ConfigError if the field is set to something else."""
    value = hf.get(name)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{where(hf)}: {name} is {shown(value)}: expected true or false")
    return default if value is None else value


def listed(hf: dict[str, Any], name: str, kind: type[T]) -> list[T] | None:
    """Returns a list of items of one type, or None if the field isn't set. Raises ConfigError."""
    value = hf.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(item) is kind for item in value):
        raise ConfigError(f"{where(hf)}: {name} is {shown(value)}: expected a list of {kind.__name__}")
    return value


def choice(hf: dict[str, Any], name: str, known: Collection[str], default: str | None = None) -> str:
    """Returns one of the known texts. Raises ConfigError if the field is set to something else."""
    value = hf.get(name) or default
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"{where(hf)}: {name} {shown(value)} is not supported: expected one of {', '.join(known)}")
    return value


def section(hf: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns a nested object. Raises ConfigError if it is missing or something else."""
    value = hf.get(name)
    if not isinstance(value, dict):
        raise ConfigError(f"{where(hf)}: {name} is {shown(value)}: expected an object")
    return HfConfig(value, f"{where(hf)}: {name}")


def flatten(hf: dict[str, Any]) -> dict[str, Any]:
    """Merges the fields of a nested `text_config` with those around it, which win where they are set. Raises
    ConfigError."""
    around = {name: value for name, value in hf.items() if value is not None and name != "text_config"}
    nested = {} if hf.get("text_config") is None else section(hf, "text_config")
    return HfConfig(nested | around, where(hf))


def of_layer(hf: dict[str, Any], layer: int, *names: str) -> dict[str, Any]:
    """Replaces fields that list one value per layer by that layer's value. Raises ConfigError."""
    listed = {name: value for name in names if isinstance(value := hf.get(name), list)}
    for name, values in listed.items():
        if layer not in range(len(values)):
            raise ConfigError(f"{where(hf)}: {name} has {len(values)} entries: expected one for layer {layer!r}")
    return HfConfig(hf | {name: values[layer] for name, values in listed.items()}, where(hf))


def expect(hf: dict[str, Any], name: str, supported: object) -> None:
    """Raises ConfigError if the field is set to another value than the one this family's code computes."""
    value = hf.get(name)
    if value is not None and value != supported:
        raise ConfigError(f"{where(hf)}: {name} {shown(value)} is not supported: expected {supported!r}")


def model_dtype(hf: dict[str, Any]) -> torch.dtype:
    """Returns the dtype of unquantised weights, by default bf16, which float16 becomes. Raises ConfigError for
    others."""
    name = hf.get("dtype") or hf.get("torch_dtype") or "bfloat16"
    if not isinstance(name, str) or name not in _DTYPES:
        raise ConfigError(
            f"{where(hf)}: dtype {shown(name)} is not supported: convert the checkpoint to bfloat16 or float32"
        )
    return _DTYPES[name]


def _number(
    hf: dict[str, Any], names: tuple[str, ...], default: float | None, kinds: tuple[type, ...], wanted: str
) -> Any:
    for name in names:
        value = hf.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ConfigError(f"{where(hf)}: {name} is {shown(value)}: expected {wanted}")
        return value
    if default is None:
        raise ConfigError(f"{where(hf)}: field {' or '.join(names)} is missing: expected {wanted}")
    return default
