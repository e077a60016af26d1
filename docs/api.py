"""Writes docs/api.md: every public name of `eprt`, by the module it lives in. `python docs/api.py`."""

from __future__ import annotations

from pathlib import Path

import eprt

HEAD = """# API

The public names of `eprt`, from their docstrings. Shapes use the letters of `eprt/tokens.py`: T local tokens, R agreed
tokens a rank, W ranks, K top-k, E experts, L local experts, H hidden, I intermediate. Written by `docs/api.py`.
"""


def page() -> str:
    rooms = [
        f"\n## {module}\n" + "".join(f"\n::: {module}.{name}\n" for name in eprt._HOME[module].split())
        for module in eprt._HOME
    ]
    return HEAD + "".join(rooms)


if __name__ == "__main__":
    Path(__file__).with_name("api.md").write_text(page())
