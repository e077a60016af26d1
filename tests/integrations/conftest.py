"""`--results FILE`: what passed, with which versions and on which files (scripts/test_vllm.sh)."""

from __future__ import annotations

from typing import Any

import pytest
from support.results import Results
from support.vllm_result import fingerprints


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--results"):
        config.pluginmanager.register(VllmResults(path, "vllm tests"))


class VllmResults(Results):
    """With the files' fingerprints and vLLM's version."""

    def more(self) -> dict[str, Any]:
        import vllm

        return {"notes": [f"vllm {vllm.__version__}", *(f"{path} {mark}" for path, mark in fingerprints().items())]}
