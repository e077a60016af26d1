"""`eprt tune`: the rows it measures are the ones that the plan then goes by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eprt.cli import main
from eprt.cli.tune import _merged
from eprt.plan.measured import complaint, own_tables

TINY = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 1,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
}


def test_what_was_measured_is_what_the_plan_goes_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EPRT_PLAN_ROWS", str(tmp_path / "cache" / "plan.json"))
    model = tmp_path / "config.json"
    model.write_text(json.dumps(TINY))
    asked = ["--model", str(model), "--world", "2"]
    assert main(["tune", *asked, "--device", "cpu", "--tokens", "4", "16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == str(tmp_path / "cache" / "plan.json")
    assert own_tables() == found["tables"]
    assert complaint(found["tables"]) == ""
    experts, dispatch = found["tables"]
    assert [(row["tokens"], set(row["us"])) for row in experts["rows"]] == [
        (8, {"torch_grouped"}),
        (32, {"torch_grouped"}),
    ]
    assert [(row["tokens"], set(row["us"])) for row in dispatch["rows"]] == [
        (4, {"none", "torch"}),
        (16, {"none", "torch"}),
    ]

    assert main(["explain", *asked, "--max-tokens-per-rank", "16", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["own_rows"] == found["path"]
    times = dispatch["rows"][1]["us"]
    assert shown["plans"][0]["dispatcher"] == min(times, key=times.get)
    assert "measured" in shown["plans"][0]["reason"]
    assert "eprt tune" in shown["plans"][0]["reason"]


def test_rows_that_were_not_measured_again_are_kept() -> None:
    def table(**us_by_tokens: float) -> dict[str, object]:
        rows = [{"ranks": 2, "tokens": int(name[1:]), "us": {"none": us}} for name, us in us_by_tokens.items()]
        return {"kind": "dispatch", "sm": 0, "source": "x", "rows": rows}

    merged = _merged([table(t1=5.0, t8=6.0)], [table(t8=1.0)])
    assert merged == [table(t8=1.0), table(t1=5.0)]
