"""mkdocs hook: the site holds the result files, so that a link to a number's source leads there as it does in the
repository, where the files lie beside docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def on_files(files: Any, config: Any) -> Any:
    for path in sorted(RESULTS.rglob("*.json")):
        where = f"benchmarks/results/{path.relative_to(RESULTS).as_posix()}"
        files.append(File.generated(config, where, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"\]\(\.\./((?:\.\./)*benchmarks/results/)", r"](\1", markdown)
