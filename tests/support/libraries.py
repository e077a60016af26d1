"""Libraries that few tests read: imported by the first of these, not by every worker that collects them."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


class Later:
    """Has a module's attributes; imports it for the first one."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest asks whatever it meets for __test__ and the like
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skips a file's tests where one of these isn't installed."""
    missing = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}, not installed here")


def folder(package: str) -> Path:
    """Where its files lie; nowhere, if it isn't installed."""
    found = find_spec(package)
    return Path(found.origin).parent if found and found.origin else Path()
