"""The modules that hold eprt's own kernels."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def kernel_modules() -> list[str]:
    """Returns the names of all modules below `eprt` with a kernel, or a function of kernels, of Triton's or Gluon's."""
    paths = [path for path in (ROOT / "eprt").rglob("*.py") if re.search(r"@(triton|gluon)\.jit", path.read_text())]
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
