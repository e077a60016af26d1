"""The files that the kept result of scripts/test_vllm.sh depends on, by content."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "tests" / "vllm_cpu.json"
PATTERNS = (
    "eprt/integrations/engine/*.py",
    "eprt/integrations/vllm/*.py",
    "tests/integrations/*.py",
    "scripts/test_vllm.sh",
    "launch/vllm_serve.sh",
)


def fingerprints() -> dict[str, str]:
    """Path in the repository -> SHA-256, the first 16 digits."""
    files = sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern))
    return {str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in files}
