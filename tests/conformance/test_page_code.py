"""The Python blocks of the pages run, in order, on four gloo ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.jobs.page_jobs import check_backends, run_blocks

from eprt.conformance.tiny_model import write_tiny_checkpoint
from eprt.ranks.launcher import launch

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)


def test_in_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="pip install 'eprt[transformers]'")
    model = str(write_tiny_checkpoint(tmp_path / "tiny"))
    page = "transformers.md"
    found = launch(run_blocks, 4, timeout_s=110, page=page, blocks=blocks(page), names={"MODEL": model})
    assert [len(rank["tokens"]) for rank in found] == [2, 0, 0, 0]
    assert all(len(row) <= 8 for row in found[0]["tokens"])
    assert [rank["steady"] for rank in found] == [[found[0]["tokens"][0]]] * 4, "from graphs or not"
    assert found[0]["logits"] == (1, 3, 512)


def test_in_your_own_engine() -> None:
    page = "own_engine.md"
    found = launch(run_blocks, 4, page=page, blocks=blocks(page), names={})
    assert [rank["n"] for rank in found] == [3, 3, 3, 3], "all ranks leave with the one that has the most steps"
    assert [rank["output"] for rank in found] == [(4, 64), (0, 64), (6, 64), (0, 64)]


def test_extending(tmp_path: Path) -> None:
    (tmp_path / "my_backends.py").write_text("\n".join(blocks("extending.md")))
    names = {"module": "my_backends", "dispatcher": "broadcast", "executor": "one_by_one"}
    found = launch(check_backends, 4, timeout_s=110, folder=str(tmp_path), **names)
    assert not [row for rank in found for row in rank if not row.ok]
    assert {row.check.kind for row in found[0]} == {"transport", "interleaved", "layer"}


def test_rl() -> None:
    page = "rl.md"
    found = launch(run_blocks, 4, page=page, blocks=blocks(page), names={})
    assert [rank["changed"] for rank in found] == [[True, True]] * 4
