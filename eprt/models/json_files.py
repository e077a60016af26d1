"""Reads JSON that somebody else wrote: within stated limits, in time linear in its size, each key once."""

from __future__ import annotations

import json
import re
import reprlib
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from eprt.errors import CheckpointError

MAX_DEPTH = 64
MAX_DIGITS = 19  # of an integer: what fits 64 bits

_NOT_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"?|[^][{}"]+', re.DOTALL)

_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = _brief.maxlong = 120


def shown(value: object) -> str:
    """Returns `repr` of a value from a file, cut to the length that a message bears."""
    return _brief.repr(value)


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """Parses a JSON object.

    Raises:
        CheckpointError: naming `where`: not JSON, another kind of value, a key twice in one object, an integer beyond
            64 bits, NaN or infinity, or nested deeper than 64.
    """
    _require_shallow(raw, where)
    try:
        parsed = json.loads(
            raw,
            object_pairs_hook=lambda pairs: _unique(pairs, where),
            parse_int=lambda digits: _integer(digits, where),
            parse_constant=lambda name: _refuse(f"{where}: {name} is not JSON: expected a finite number"),
        )
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{where}: found a JSON {type(parsed).__name__}: expected an object")
    return parsed


def read_object(path: Path, limit: int) -> dict[str, Any]:
    """Reads the object in a file of at most `limit` bytes. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            raw = file.read(limit + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error}") from error
    if len(raw) > limit:
        size = path.stat().st_size
        raise CheckpointError(f"{path}: {size} bytes, over the limit of {limit}; is it really a JSON description?")
    return parse_object(raw, str(path))


def _require_shallow(raw: bytes, where: str) -> None:
    depth = deepest = 0
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:  # else it can't be deeper; brackets in strings count here, too
        for byte in _NOT_BRACKETS.sub(b"", raw):  # strings are left out
            depth += 1 if byte in b"[{" else -1
            deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        _refuse(f"{where}: nested {deepest} deep: expected at most {MAX_DEPTH}")


def _unique(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        _refuse(f"{where}: key {shown(name)} appears twice: expected it once")
    return found


def _integer(digits: str, where: str) -> int:
    if len(digits.lstrip("-")) > MAX_DIGITS:
        _refuse(f"{where}: an integer of {len(digits)} digits: expected at most {MAX_DIGITS}")
    return int(digits)


def _refuse(message: str) -> NoReturn:
    raise CheckpointError(message)
