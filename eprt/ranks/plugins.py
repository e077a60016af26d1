"""Imports modules from outside the package that register backends or model families, in this process and its ranks."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from eprt.errors import ConfigError

_loaded: list[str] = []


def load_plugins(modules: Iterable[str]) -> None:
    """Imports each module; ranks that this process starts from now on import it before their first job.

    Raises:
        ConfigError: a module can't be imported. The message names it and the reason.
    """
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(f"--plugin {name}: the module can't be imported: {why}") from error
        if name not in _loaded:
            _loaded.append(name)


def loaded_plugins() -> tuple[str, ...]:
    """Returns the names of the modules that `load_plugins` has imported here, in their order."""
    return tuple(_loaded)
