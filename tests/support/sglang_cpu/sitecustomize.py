"""Stand-ins for packages that SGLang imports and a CPU never calls; for PYTHONPATH alone (scripts/test_sglang.sh).

PyPI's torchvision, torchaudio and torchao want a CUDA build of torch, and sgl_kernel's wheels hold CUDA libraries.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ABSENT = ("torchvision", "torchaudio", "torchao", "sgl_kernel")


class Named(type):
    """A class that has every attribute: its own name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Absent(ModuleType):
    """A module with a class for every name."""

    __version__ = "0.26.0"  # compared by transformers

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Named(name, (), {})


class Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] in ABSENT else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


sys.meta_path.append(Finder())  # behind the others: what is installed is used
