"""Writes the table of transformers' families in docs/transformers.md, from the installed transformers.

`python docs/figures/families.py`; tests/conformance/test_families.py fails where the page shows anything else.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "transformers.md"
REGION = re.compile(r"(<!-- families: python docs/figures/families\.py -->\n).*?(<!-- end of families -->)", re.DOTALL)


def _lines() -> Iterator[str]:
    import transformers
    from support.cases.tiny_families import REASONS, folders, model_types

    from eprt.models import FAMILIES

    names = folders()
    yield f"{len(names) - len(REASONS)} of the {len(names)} of transformers {transformers.__version__}:"
    yield ""
    yield "| family | way | tested |"
    yield "| --- | --- | --- |"
    for name in names:
        way = "own reader" if FAMILIES.keys() & model_types(name) else "transformers' block"
        reason = REASONS.get(name)
        tested = "2 and 4 ranks" if reason is None else f"no: {reason}"
        yield f"| {name} | {way if reason is None else '-'} | {tested} |"


def written(text: str) -> str:
    """Returns the page with the table as it is to be."""
    return REGION.sub(lambda found: "\n".join([found[1].rstrip(), *_lines(), found[2]]), text)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    PAGE.write_text(written(PAGE.read_text()))
