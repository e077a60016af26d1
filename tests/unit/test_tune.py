"""`eprt tune`: the rows it measures are the ones that the plan then goes by."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from support.jobs import layer_jobs as jobs
from support.jobs import rank_jobs

from eprt.cli import main, tune
from eprt.cli.tune import Part, _merged, _missing, measure_experts, parts
from eprt.config import MoEConfig
from eprt.dispatch import DISPATCHERS
from eprt.experts import EXECUTORS
from eprt.plan.measured import complaint, own_tables
from eprt.ranks.process import RankContext

TINY = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 1,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
}


@pytest.mark.parametrize(("world", "experts"), [(2, (8, 2)), (3, (32, 20))], ids=["even", "uneven, many at once"])
def test_what_was_measured_is_what_the_plan_goes_by(tmp_path: Path, monkeypatch, capsys, world, experts) -> None:
    monkeypatch.setenv("EPRT_PLAN_ROWS", str(tmp_path / "cache" / "plan.json"))
    model = tmp_path / "config.json"
    model.write_text(json.dumps(TINY | dict(zip(("num_experts", "num_experts_per_tok"), experts, strict=True))))
    asked = ["--model", str(model), "--world", str(world)]
    assert main(["tune", *asked, "--device", "cpu", "--tokens", "4", "16", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == str(tmp_path / "cache" / "plan.json")
    assert own_tables() == found["tables"]
    assert complaint(found["tables"]) == ""
    assert found["cut"] == []
    experts, dispatch = found["tables"]
    assert [(row["tokens"], set(row["us"])) for row in experts["rows"]] == [
        (4 * world, {"torch_grouped"}),
        (16 * world, {"torch_grouped"}),
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
    assert "torch_grouped measured" in shown["plans"][0]["reason"]
    assert "eprt tune" in shown["plans"][0]["reason"]
    lacking = "eprt tune has no times of this model at 128 tokens a rank: --tokens 128 adds them"
    for words, lacks in ((("--max-tokens-per-rank", "16"), False), ((), True)):
        assert main(["explain", *asked, *words, "--json"]) == 0
        assert (lacking in capsys.readouterr().out) == lacks, words


def test_rows_that_were_not_measured_again_are_kept() -> None:
    def table(**us_by_tokens: float) -> dict[str, object]:
        rows = [{"ranks": 2, "tokens": int(name[1:]), "us": {"none": us}} for name, us in us_by_tokens.items()]
        return {"kind": "dispatch", "sm": 0, "source": "x", "rows": rows}

    merged = _merged([table(t1=5.0, t8=6.0)], [table(t8=1.0)])
    assert merged == [table(t8=1.0), table(t1=5.0)]


def test_what_takes_too_long_is_ended_and_said(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An executor that would compile for a minute costs its share of the budget; dispatchers are measured all the
    same, by ranks that were started again."""
    monkeypatch.setenv("EPRT_PLAN_ROWS", str(tmp_path / "plan.json"))
    monkeypatch.setattr(tune, "measure_experts", rank_jobs.compiles_for_a_minute)
    monkeypatch.setattr(tune, "SHARE", 0.15)
    model = tmp_path / "config.json"
    model.write_text(json.dumps(TINY))
    start = time.monotonic()
    words = ["--model", str(model), "--world", "2", "--device", "cpu", "--tokens", "4", "--budget-s", "50", "--json"]
    assert main(["tune", *words]) == 0
    assert time.monotonic() - start < 50
    found = json.loads(capsys.readouterr().out)
    assert [line.partition(": ended after ")[0] for line in found["cut"]] == ["experts by torch_grouped"]
    [dispatch] = found["tables"]
    assert [set(row["us"]) for row in dispatch["rows"]] == [{"none", "torch"}]
    assert main(["tune", *words[:-2], "1"]) == 0
    assert capsys.readouterr().out.count("not begun, the time was over") == 3
    for seconds in ("0", "nan"):
        assert main(["tune", *words[:-2], seconds]) == 2


@pytest.mark.parametrize(
    ("place", "says"),
    [
        (
            "{}",
            "expected a list of tables; let EPRT_PLAN_ROWS name another, or remove it if it was eprt tune's, which "
            "measures again",
        ),
        (None, "; EPRT_PLAN_ROWS names another"),
    ],
)
def test_a_file_that_cannot_be_read_or_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch, capsys, place: str | None, says: str
) -> None:
    (tmp_path / "plan.json").write_text(place or "")
    monkeypatch.setenv("EPRT_PLAN_ROWS", str(tmp_path / "plan.json") + "/of a file" * (place is None))
    monkeypatch.setattr("eprt.cli.tune.ranks", lambda *_: pytest.fail("ranks were started"))
    assert main(["tune", "--model", "gpt-oss-20b"]) == 2
    assert says in capsys.readouterr().err


def test_no_number_of_tokens_is_begun_after_its_time() -> None:
    config = MoEConfig(8, 2, 64, 32)
    context = RankContext(0, 1, "cpu")
    found = measure_experts(context, "torch_grouped", config, (4, 16), seconds=0.0)
    context.close()
    assert found == {}
    assert _missing(Part("torch_grouped"), [found], 2) == "experts by torch_grouped: 0 of 2 numbers of tokens"


def test_what_compiles_for_minutes_comes_last() -> None:
    config = MoEConfig(128, 4, 2880, 2880, weight_format="mxfp4")
    names = list(dict.fromkeys(part.name for part in parts(config, (1, 8), 2, "cuda")))
    requirements = {name: {**EXECUTORS, **DISPATCHERS}[name].requirement for name in names}
    from_libraries = [name for name in names if (r := requirements[name]) is not None and r.module != "triton"]
    assert names[-len(from_libraries) :] == from_libraries
    assert {"torch_grouped", "symm", "none"} <= set(names) - set(from_libraries)
    assert "reference" not in names
    assert [part.case for part in parts(config, (1, 8), 1, "cuda")].count(None) == len(EXECUTORS) - 1


def dispatch_rows(**us: float) -> str:
    row = {"payload": "bf16", "ranks": 2, "hidden": jobs.H, "top_k": jobs.K, "tokens": 32, "us": us}
    return json.dumps([{"kind": "dispatch", "sm": 0, "source": "a rank's own", "rows": [row]}])


def test_ranks_with_other_rows_are_told_so_in_the_same_words(tmp_path: Path, pools) -> None:
    """The faster dispatcher is another one by each file; without the comparison one rank would wait in each."""
    files = [tmp_path / name for name in ("torch.json", "none.json", "same.json", "broken.json")]
    for file, rows in zip(files, [{"none": 9.0, "torch": 1.0}, {"none": 1.0, "torch": 9.0}] * 2, strict=True):
        file.write_text(dispatch_rows(**rows))
    told = pools(2).run(jobs.tuned, files=files[:2])
    assert told[0] == told[1]
    lines = told[0][0].splitlines()
    assert lines[0].startswith("WorldMismatch: the ranks disagree about this call (fingerprint, dispatcher, rows of ep")
    assert [line.split()[0] for line in lines[1:]] == ["rank", "0", "1"]
    assert [line.split()[2] for line in lines[2:]] == ["torch", "none"]
    assert lines[2].split()[-1] != lines[3].split()[-1]

    assert pools(2).run(jobs.tuned, files=[files[0], tmp_path / "none there"])[0][0].count("none") == 1
    files[2].write_text(dispatch_rows(torch=1.0, none=9.0))  # written elsewhere, in another order: the same rows
    assert pools(2).run(jobs.tuned, files=[files[0], files[2]]) == [("nothing was raised", True)] * 2
    files[3].write_text("{")
    broken = pools(2).run(jobs.tuned, files=[files[0], files[3]])
    assert broken[0] == broken[1]
    assert "ConfigError" in broken[0][0]
    assert "broken.json" in broken[0][0]
