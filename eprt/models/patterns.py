"""Finds a module's name in the lists, patterns and regular expressions of a `quantization_config`, in bounded time."""

from __future__ import annotations

import re
from collections.abc import Sized

from eprt.errors import ConfigError
from eprt.json_files import shown

Modules = tuple[str, ...]
EXPRESSION = "re:"
MAX_PATTERNS = 1000  # with wildcards or regular expressions, in one list
MAX_REPEATS = 4  # of a regular expression, but for digits: its time grows with the name's length to this power
_REPEAT = re.compile(r"(?<!\\d)(?<!\\)[*+{]")
_NESTED = re.compile(r"(?<!\\)\)[*+{]")


def left_out(names: Modules, left: list[str]) -> bool:
    """Tells whether a list has one of `names`, or a part of one between dots (`model.layers.0.`)."""
    text = " ".join(f".{name}." for name in names)
    # The first is quick: lists have hundreds.
    return any(part in text and f".{part.strip('.')}." in text for part in left)


def first_match(names: Modules, listed: list[str], where: str) -> str | None:
    """Returns the item of a list that names one of `names`, as compressed-tensors does: whole, else the first `re:`
    of the alphabet whose regular expression fits its beginning.

    Raises:
        ConfigError: an expression that isn't one, or whose time could explode.
    """
    if whole := next(filter(set(names).__contains__, listed), None):
        return whole
    found = sorted(item for item in listed if item.startswith(EXPRESSION))
    require_few(found, "regular expressions", where)
    compiled = ((item, _compile(item.removeprefix(EXPRESSION), where)) for item in found)
    return next((item for item, expression in compiled if any(map(expression.match, names))), None)


def _compile(expression: str, where: str) -> re.Pattern[str]:
    if _NESTED.search(expression) or len(_REPEAT.findall(expression)) > MAX_REPEATS:
        raise ConfigError(
            f"{where}: regular expression {shown(expression)} is not supported: expected no repeated group, and at "
            f"most {MAX_REPEATS} repeats"
        )
    try:
        return re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"{where}: {shown(expression)} is no regular expression: {error}") from error


def require_few(patterns: Sized, kind: str, where: str) -> None:
    """Raises ConfigError for more patterns than take bounded time."""
    if len(patterns) > MAX_PATTERNS:
        raise ConfigError(f"{where}: {len(patterns)} {kind}: expected at most {MAX_PATTERNS}")
