"""`--results FILE`: what passed, with which versions and on which files (scripts/test_vllm.sh, test_sglang.sh)."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
from support.engine_result import ENGINES, fingerprints
from support.results import Results


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--results"):
        engine = next(engine for engine in ENGINES if Path(path).name.startswith(engine))
        config.pluginmanager.register(EngineResults(path, engine))


class EngineResults(Results):
    """With the files' fingerprints and the engine's version."""

    def __init__(self, path: str, engine: str) -> None:
        super().__init__(path, f"{engine} tests")
        self.engine = engine

    def more(self) -> dict[str, Any]:
        marks = [f"{path} {mark}" for path, mark in fingerprints(self.engine).items()]
        version = importlib.metadata.version(self.engine).partition("+")[0]
        return {"notes": [f"{self.engine} {version}", *marks]}
