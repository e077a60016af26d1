"""The plan's rows are those of the result files, and the nearest row answers."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest

from eprt.config import MoEConfig
from eprt.measured import dispatch_row, experts_row

ROOT = Path(__file__).parents[2]
TABLES = json.loads(resources.files("eprt").joinpath("measured.json").read_text())


def test_every_dispatch_row_is_in_its_result_file() -> None:
    [table] = [table for table in TABLES if table["kind"] == "dispatch"]
    results = json.loads((ROOT / table["source"]).read_text())["rows"]
    measured = {
        (r["transport"], r["hidden"], r["top_k"], r["tokens"]): r["p50_us"]
        for r in results
        if r["routing"] == "uniform"
    }
    for row in table["rows"]:
        for name, us in row["us"].items():
            assert measured[name, row["hidden"], row["top_k"], row["tokens"]] == us


def test_every_experts_table_names_a_result_file_that_exists() -> None:
    for table in TABLES:
        assert (ROOT / table["source"].split(":")[0]).is_file(), table["source"]
        assert table["rows"]


@pytest.mark.parametrize(
    ("hidden", "top_k", "tokens", "found"),
    [(7168, 8, 128, (7168, 8, 128)), (6000, 8, 100, (7168, 8, 128)), (2048, 4, 2500, (2880, 4, 2048))],
)
def test_the_nearest_shape_answers(hidden: int, top_k: int, tokens: int, found: tuple[int, int, int]) -> None:
    config = MoEConfig(128, top_k, hidden, 2048)
    row = dispatch_row(config, tokens, sm=90)
    assert row is not None
    assert f"hidden {found[0]}, top-k {found[1]}, {found[2]} tokens a rank" in row.what
    assert "benchmarks/results/" in str(row)


def test_nothing_measured_is_no_row() -> None:
    config = MoEConfig(128, 4, 2880, 2880, weight_format="f32")
    assert dispatch_row(config, 128, sm=100) is None
    assert experts_row(config, 32, 128, sm=90) is None
