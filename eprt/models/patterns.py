"""Matches names of modules against the lists of a quantization_config, in bounded time: patterns are a file's words."""

from __future__ import annotations

import re
from collections.abc import Iterable

from eprt.errors import ConfigError
from eprt.json_files import shown

MAX_PATTERNS = 1000  # with wildcards or regular expressions, in one list
MAX_REPEATS = 4  # of a regular expression, but for digits: its time grows with the name's length to this power
_PREFIX = "re:"
_REPEAT = re.compile(r"(?<!\\d)(?<!\\)[*+{]")
_NESTED = re.compile(r"(?<!\\)\)[*+{]")


def matches(names: Iterable[str], listed: list[str], where: str) -> bool:
    """Tells whether a list names one of `names`, as compressed-tensors does: whole, or by `re:` and a regular
    expression that fits its beginning.

    Raises:
        ConfigError: an expression that isn't one, or whose time could explode.
    """
    names = tuple(names)
    if not set(names).isdisjoint(listed):
        return True
    expressions = [item.removeprefix(_PREFIX) for item in listed if item.startswith(_PREFIX)]
    if len(expressions) > MAX_PATTERNS:
        raise ConfigError(f"{where}: {len(expressions)} regular expressions: expected at most {MAX_PATTERNS}")
    return any(compiled.match(name) for compiled in map(lambda e: _compile(e, where), expressions) for name in names)


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
