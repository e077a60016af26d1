"""The files that the kept result of an engine's tests depends on, by content."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGINES = ("vllm", "sglang")
PATTERNS = (
    "eprt/integrations/engine/*.py",
    "eprt/integrations/{}/*.py",
    "tests/integrations/conftest.py",
    "tests/integrations/*{}*.py",
    "tests/support/engine_models.py",
    "tests/support/{}_cpu/*.py",
    "scripts/test_{}.sh",
    "launch/{}_serve.sh",
)


def result_of(engine: str) -> Path:
    return ROOT / "benchmarks" / "results" / "tests" / f"{engine}_cpu.json"


def fingerprints(engine: str) -> dict[str, str]:
    """Path in the repository -> SHA-256, the first 16 digits."""
    files = sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern.format(engine)))
    return {str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in files}
