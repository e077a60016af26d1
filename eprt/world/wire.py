"""Sends Python values between ranks as JSON. A peer's bytes are data, whatever they say: nothing is executed, no
module is imported for them, and no class but eprt's own dataclasses is made."""

from __future__ import annotations

import base64
import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from eprt.errors import UsageError
from eprt.world.collectives import Collectives

MAX_BYTES = 1 << 30


def gather_values(world: Collectives, value: Any) -> list[Any]:
    """Returns every rank's `value`, in rank order; None for lost ranks. Collective.

    Args:
        value: None, numbers, text, bytes, dtypes, CPU tensors, eprt's dataclasses, and lists, tuples and dicts of them.

    Raises:
        UsageError: something else, or more than 1 GiB of it; a peer's value that isn't such a one.
    """
    raw = pack(value)
    sizes = world.gather_control(torch.tensor([len(raw)], device="cpu")).flatten().tolist()
    if not all(0 < size <= MAX_BYTES for size, alive in zip(sizes, world.alive, strict=True) if alive):
        raise UsageError(f"values of {sizes} bytes between ranks: expected at most {MAX_BYTES} from each")
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
    padded[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    rows = world.gather_control(padded)
    return [unpack(row[:size].numpy().tobytes()) if size else None for row, size in zip(rows, sizes, strict=True)]


def pack(value: Any) -> bytes:
    """Raises UsageError for a type that doesn't travel."""
    return json.dumps(_tagged(value)).encode()


def unpack(raw: bytes) -> Any:
    """Raises UsageError for bytes that `pack` didn't write."""
    try:
        return _untagged(json.loads(raw))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, RuntimeError) as error:
        raise UsageError(f"a peer sent a value that can't be read: {type(error).__name__}: {error}") from error


def _tagged(value: Any) -> Any:
    """Returns JSON's own scalars as they are, all else as {kind: content}."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_tagged(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_tagged(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_tagged(key), _tagged(item)] for key, item in value.items()]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), base64.b64encode(data).decode()]}
    kind = type(value)
    if dataclasses.is_dataclass(kind) and kind.__module__.partition(".")[0] == "eprt":
        fields = {field.name: _tagged(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
        return {"dataclass": [kind.__module__, kind.__qualname__, fields]}
    raise UsageError(f"a {kind.__module__}.{kind.__qualname__} doesn't travel between ranks: {__name__} says what does")


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    return _KINDS[kind](content)


def _tensor(content: Any) -> torch.Tensor:
    name, shape, data = content
    raw = bytearray(base64.b64decode(data, validate=True))
    flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8, device="cpu")
    return flat.view(_dtype(name)).view(shape)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name!r} is no dtype")
    return found


def _dataclass(content: Any) -> Any:
    module, name, fields = content
    found = getattr(sys.modules[module], name) if module.partition(".")[0] == "eprt" else None
    if not (isinstance(found, type) and dataclasses.is_dataclass(found) and found.__module__ == module):
        raise TypeError(f"{module}.{name} is none of eprt's dataclasses")
    return found(**{key: _untagged(item) for key, item in fields.items()})


_KINDS: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda content: tuple(_untagged(item) for item in content),
    "dict": lambda content: {_untagged(key): _untagged(item) for key, item in content},
    "bytes": lambda content: base64.b64decode(content, validate=True),
    "dtype": _dtype,
    "tensor": _tensor,
    "dataclass": _dataclass,
}
