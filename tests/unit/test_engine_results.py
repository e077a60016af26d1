"""The plugins' tests under their engines are too heavy for every CI run: the last result must be of the files as they
are."""

from __future__ import annotations

import importlib
import json

import pytest
from support.engine_result import ENGINES, fingerprints, result_of

REMEDY = "run `bash scripts/test_{}.sh` and commit what it writes below benchmarks/results/tests"


@pytest.mark.parametrize("engine", ENGINES)
def test_the_kept_result_is_of_these_files(engine: str) -> None:
    notes = json.loads(result_of(engine).read_text())["notes"]
    kept, found = dict(note.split(" ") for note in notes[1:]), fingerprints(engine)
    changed = {path for path, mark in found.items() if kept.get(path) != mark} | (set(kept) - set(found))
    assert not changed, f"{sorted(changed)} changed since {engine}'s tests ran: {REMEDY.format(engine)}"
    tested = importlib.import_module(f"eprt.integrations.{engine}").TESTED
    assert notes[0].removeprefix(f"{engine} ") in tested


@pytest.mark.parametrize("engine", ENGINES)
def test_everything_passed_then(engine: str) -> None:
    rows = json.loads(result_of(engine).read_text())["rows"]
    assert sum(row["passed"] for row in rows) >= 6
    assert not [row["test"] for row in rows if row["failed"] or row["skipped"]], REMEDY.format(engine)
