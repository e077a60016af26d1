"""Checks what callers pass against the annotations of what they call, before anything is made of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from eprt.errors import ConfigError
from eprt.json_files import shown

_ABSTRACT: dict[Any, type] = {int: Integral, float: Real, Path: os.PathLike}  # numpy's numbers, too


def require_kinds(of: Callable[..., Any], given: Mapping[str, object]) -> None:
    """Raises ConfigError unless what is `given` by name is of the kinds that the annotations of `of` name. Numbers
    inside a sequence aren't looked at.

    Args:
        of: a function, whose first line passes its `locals()`; or a dataclass, which passes its `vars`.
    """
    for name, hint in _hints(of).items():
        if name in given and not _fits(value := given[name], hint):
            if get_origin(hint) is Mapping and isinstance(value, Mapping):
                hint = get_args(hint)[1]
                name, value = next((f"{name}[{key!r}]", each) for key, each in value.items() if not _fits(each, hint))
            kind = f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.")
            found = shown(value) if isinstance(value, (str, Real, list, tuple)) else f"is {kind}"
            raise ConfigError(f"{name} {found}: expected {_words(hint)}")


_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


def _fits(value: Any, hint: Any) -> bool:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(value, each) for each in inner)
    if kind is Any:
        return True
    if kind is Literal:
        return isinstance(value, str) and value in inner
    if kind is Mapping:
        return isinstance(value, Mapping) and all(_fits(each, inner[1]) for each in value.values())
    if kind is Sequence:  # tensors and arrays, too
        several = isinstance(value, Iterable) and isinstance(value, Sized) and not isinstance(value, (str, Mapping))
        return several and (inner[0] in _ABSTRACT or all(_fits(each, inner[0]) for each in value))
    return isinstance(value, _ABSTRACT.get(kind) or kind) and (kind is bool or not isinstance(value, bool))


def _words(hint: Any) -> str:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return " or ".join(map(_words, inner))
    if kind is Literal:
        return f"one of {', '.join(inner)}"
    if kind is Sequence:
        return f"a sequence of {_words(inner[0])}"
    if kind is Mapping:
        return f"a mapping to {_words(inner[1])}"
    return "None" if kind is NoneType else kind.__name__
