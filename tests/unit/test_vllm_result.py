"""The plugin's tests under vLLM are too heavy for every CI run: their last result must be of the files as they are."""

from __future__ import annotations

import json

from support.vllm_result import RESULT, fingerprints

from eprt.integrations.vllm import TESTED

REMEDY = "run `bash scripts/test_vllm.sh` and commit benchmarks/results/tests/vllm_cpu.json"


def test_the_kept_result_is_of_these_files() -> None:
    notes = json.loads(RESULT.read_text())["notes"]
    kept = dict(note.split(" ") for note in notes[1:])
    changed = {path for path, mark in fingerprints().items() if kept.get(path) != mark} | (
        set(kept) - set(fingerprints())
    )
    assert not changed, f"{sorted(changed)} changed since vLLM's tests ran: {REMEDY}"
    assert notes[0].removeprefix("vllm ") in TESTED


def test_everything_passed_then() -> None:
    rows = json.loads(RESULT.read_text())["rows"]
    assert sum(row["passed"] for row in rows) >= 6
    assert not [row["test"] for row in rows if row["failed"] or row["skipped"]], REMEDY
