"""Reads JSON that somebody else wrote (within stated limits, in time linear in its size, each key once), and makes
values fit to be written as JSON."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections import Counter
from pathlib import Path
from typing import Any

from eprt.errors import CheckpointError, ConfigError

MAX_DEPTH = 64
MAX_DIGITS = 19  # of an integer: what fits 64 bits
MAX_VALUES = 1_000_000  # in one file: 1.5 s and 150 MB

_NOT_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"?|[^][{}"]+', re.DOTALL)

_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = _brief.maxlong = 120


class _RefusedError(ValueError):
    """Says what keeps a text from being JSON that is read here."""


def shown(value: object) -> str:
    """Returns `repr` of a value from a file, cut to the length that a message bears."""
    return _brief.repr(value)


def finite(value: Any) -> Any:
    """Returns a value to write: numbers that JSON hasn't got (NaN, infinity) become null."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def layer_number(name: str) -> int | None:
    """Returns the layer that a key names, written as JSON writes numbers; None for others: 01 would be 1 once more."""
    digits = name.isascii() and name.isdigit() and len(name) <= MAX_DIGITS
    return int(name) if digits and name == str(int(name)) else None


def parse(
    raw: bytes | bytearray,
    where: str,
    kind: type[CheckpointError | ConfigError] = CheckpointError,
    all_finite: bool = True,
    most_values: int = MAX_VALUES,
) -> Any:
    """Parses JSON.

    Raises:
        `kind`: naming `where`: not JSON, over `most_values` values, a key twice in one object, an integer beyond 64
            bits, nested deeper than 64, or where `all_finite` is asked for NaN or infinity.
    """
    try:
        _require_few(raw, most_values)
        _require_shallow(raw)
        real = _finite if all_finite else float
        return json.loads(raw, object_pairs_hook=_unique, parse_int=_integer, parse_float=real, parse_constant=real)
    except _RefusedError as error:
        raise kind(f"{where}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise kind(f"{where}: not valid JSON: {error}") from error


def parse_object(raw: bytes | bytearray, where: str, most_values: int = MAX_VALUES) -> dict[str, Any]:
    """Parses the JSON object of a checkpoint, where numbers may be infinite: Nemotron-H's `time_step_limit` is. Raises
    CheckpointError as `parse` does, and for another kind of value."""
    parsed = parse(raw, where, all_finite=False, most_values=most_values)
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{where}: found a JSON {type(parsed).__name__}: expected an object")
    return parsed


def read_bounded(path: Path, limit: int, kind: type[CheckpointError | ConfigError] = CheckpointError) -> bytes:
    """Reads a file of at most `limit` bytes. Raises `kind`, naming it."""
    try:
        with path.open("rb") as file:
            raw = file.read(limit + 1)
    except (OSError, ValueError) as error:  # the second: a NUL in the path
        raise kind(f"{path}: can't be read: {error}") from error
    if len(raw) > limit:
        size = path.stat().st_size
        raise kind(f"{path}: {size} bytes, over the limit of {limit}; is it really a JSON description?")
    return raw


def read_object(path: Path, limit: int) -> dict[str, Any]:
    """Reads the object in a file of at most `limit` bytes. Raises CheckpointError."""
    return parse_object(read_bounded(path, limit), str(path))


def _require_few(raw: bytes | bytearray, most: int) -> None:
    """Each value but the first comes after a comma or a bracket, so that they are counted before any is made."""
    found = raw.count(b",") + raw.count(b"[") + raw.count(b"{")  # those in strings count, too
    if found > most:
        raise _RefusedError(f"about {found} values: expected at most {most} in one file")


def _require_shallow(raw: bytes | bytearray) -> None:
    depth = deepest = 0
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:  # else it can't be deeper; brackets in strings count here, too
        for byte in _NOT_BRACKETS.sub(b"", raw):  # strings are left out
            depth += 1 if byte in b"[{" else -1
            deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise _RefusedError(f"nested {deepest} deep: expected at most {MAX_DEPTH}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise _RefusedError(f"key {shown(name)} appears twice: expected it once")
    return found


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > MAX_DIGITS:
        raise _RefusedError(f"an integer of {len(digits)} digits: expected at most {MAX_DIGITS}")
    return int(digits)


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise _RefusedError(f"{text[:MAX_DIGITS]}: expected a finite number")
    return value
