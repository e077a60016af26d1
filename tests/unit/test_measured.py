"""The plan's rows are those of the result files (test_tables.py: the pages' are, too); what a row answers for."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

import pytest

from eprt.bench.shapes import SHAPES
from eprt.config import MoEConfig
from eprt.dispatch import DISPATCHERS
from eprt.errors import ConfigError
from eprt.experts import EXECUTORS
from eprt.plan.measured import complaint, dispatch_time, experts_time

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TABLES = json.loads(resources.files("eprt.plan").joinpath("measured.json").read_text())


def dispatch_times(names: Iterable[str], file: str, payload: str = "bf16") -> dict[tuple[str, int, int, int], float]:
    """(transport, hidden, top-k, tokens a rank) -> the median that was measured under uniform routing."""
    rows = json.loads((RESULTS / file).read_text())["rows"]
    chosen = [r for r in rows if r["routing"] == "uniform" and r["transport"] in names and r["payload"] == payload]
    return {(r["transport"], r["hidden"], r["top_k"], r["tokens"]): r["p50_us"] for r in chosen}


def expert_times(file: str) -> dict[tuple[str, str, int], float]:
    """(executor, shape, tokens of all ranks) -> microseconds, as measured with bf16 activations; calls without a local
    row and other libraries aside."""
    rows = [
        r for r in json.loads((RESULTS / file).read_text())["rows"] if r["local_rows"] and r["executor"] in EXECUTORS
    ]
    return {(r["executor"], r["shape"], r["tokens"]): r["us"] for r in rows if r.get("activations", "bf16") == "bf16"}


def sizes_of(shape: str) -> tuple[int, int, int, int, str]:
    """What a row of the plan says of a benchmarked shape."""
    config, ep_size = SHAPES[shape].config, SHAPES[shape].ep_size
    local = config.num_experts // ep_size
    return config.hidden_size, config.intermediate_size, config.top_k, local, config.weight_format


@pytest.mark.parametrize(
    ("payload", "ranks", "file"),
    [
        ("bf16", 4, "dispatch_h200_x4.json"),
        ("bf16", 2, "dispatch_h200_x2.json"),
        ("fp8_block", 2, "dispatch_fp8_h200_x2.json"),
    ],
)
def test_the_dispatch_rows_are_those_of_the_result_file(payload: str, ranks: int, file: str) -> None:
    [table] = [table for table in TABLES if table["source"] == f"benchmarks/results/{file}"]
    assert table["kind"] == "dispatch"
    assert {(row["payload"], row["ranks"]) for row in table["rows"]} == {(payload, ranks)}
    assert {row["ranks"] for row in json.loads((RESULTS / file).read_text())["rows"]} == {ranks}
    rows = table["rows"]
    planned = {(name, r["hidden"], r["top_k"], r["tokens"]): us for r in rows for name, us in r["us"].items()}
    assert planned == dispatch_times(DISPATCHERS, file, payload)


@pytest.mark.parametrize("file", ["experts_h200.json", "experts_grouped_h200.json"])
def test_the_experts_rows_are_those_of_the_result_file(file: str) -> None:
    """To the 0.1 us that the rows keep."""
    [table] = [table for table in TABLES if table["source"] == f"benchmarks/results/{file}"]
    assert table["kind"] == "experts"
    names = ("hidden", "intermediate", "top_k", "local_experts", "weight_format")
    planned = {
        (executor, tuple(row[name] for name in names), row["tokens"]): us
        for row in table["rows"]
        for executor, us in row["us"].items()
    }
    measured = {
        (executor, sizes_of(shape), tokens): us
        for (executor, shape, tokens), us in expert_times(file).items()
        if (executor, shape) != ("torch_grouped", "gpt-oss-120b")
    }
    assert planned == pytest.approx(measured, abs=0.0501, rel=0)


@pytest.mark.parametrize("name", sorted(path.name for path in RESULTS.glob("dispatch_*.json")))
def test_the_floors_are_those_of_the_link(name: str) -> None:
    """A token to each remote rank that needs it, a bf16 sum back. Even routing misses a rank with probability
    C(E - E/R, K) / C(E, K); up to 10% more, since the sampled routing's busiest rank counts."""
    experts = 128
    found = json.loads((RESULTS / name).read_text())
    for row in found["rows"]:
        ranks = row["ranks"]
        if row["routing"] == "uniform" and row["tokens"] >= 128:
            missed = math.comb(experts - experts // ranks, row["top_k"]) / math.comb(experts, row["top_k"])
            bf16 = 2 * row["hidden"]
            there = bf16 if row["payload"] == "bf16" else row["hidden"] + 4 * math.ceil(row["hidden"] / 128)
            moved = row["tokens"] * (ranks - 1) * (1 - missed) * (there + bf16)
            expected = moved / found["limits"]["push_gb_per_s"] / 1e3
            assert 0.98 * expected <= row["floor_us"] <= 1.1 * expected
            assert row["floor_share"] == pytest.approx(row["floor_us"] / row["p50_us"], abs=1e-3)


def dispatch(name: str = "symm", tokens: int = 128, ranks: int = 4, payload: str = "bf16", **sizes: int):
    config = MoEConfig(128, **{"top_k": 8, "hidden_size": 7168, "intermediate_size": 2048} | sizes)
    return dispatch_time(name, config, tokens, ranks, 90, payload)


def test_a_row_answers_for_its_own_shape_ranks_and_format_only() -> None:
    row = dispatch()
    assert row is not None
    assert row.us == dispatch_times(["symm"], "dispatch_h200_x4.json")["symm", 7168, 8, 128]
    assert "hidden 7168, top-8, 4 ranks, 128 tokens a rank; benchmarks/results/" in row.why
    others = ({"ranks": 8}, {"hidden_size": 6000}, {"top_k": 6}, {"payload": "nvfp4"})
    assert [dispatch(**other) for other in (*others, {"name": "deepep", "tokens": 4096})] == [None] * 5  # type: ignore[arg-type]
    assert dispatch_time("symm", MoEConfig(128, 8, 7168, 2048), 128, 4, sm=100) is None
    assert experts_time("humming", MoEConfig(128, 4, 2880, 2880, weight_format="f32"), 32, 128, sm=90) is None


def test_between_two_rows_time_is_interpolated_and_little_beyond_them_the_last_one_answers() -> None:
    low, between, high = (dispatch(tokens=tokens) for tokens in (1024, 1448, 2048))
    assert low is not None
    assert between is not None
    assert high is not None
    assert between.us == pytest.approx(math.sqrt(low.us * high.us), rel=1e-3)  # the geometric middle of both
    assert "between 1024 and 2048" in between.why
    assert [dispatch(tokens=tokens) is None for tokens in (6000, 7000)] == [False, True]


def own_rows(**changes: object) -> list[dict[str, object]]:
    row = {"payload": "bf16", "ranks": 4, "hidden": 7168, "top_k": 8, "tokens": 128, "us": {"symm": 3.5}} | changes
    return [{"kind": "dispatch", "sm": 90, "source": "my own machine", "rows": [row]}]


def test_ones_own_rows_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    monkeypatch.setenv("EPRT_PLAN_ROWS", str(path))
    shipped = dispatch()
    path.write_text(json.dumps(own_rows()))
    own = dispatch()
    assert own is not None
    assert own.us == 3.5
    assert own.why.endswith("; my own machine)")
    assert dispatch("flashinfer") == dispatch("flashinfer", tokens=128)
    path.unlink()
    assert dispatch() == shipped


HOSTILE = ("\x1b]0;mine\x07\x1b[31m", "x" * 100_211)  # what steers a terminal, or floods it


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "not valid JSON: Expecting property name"),
        (json.dumps({}), "expected a list of tables"),
        (json.dumps([{"kind": "weather"}]), "table 0: kind must be one of dispatch, experts"),
        (json.dumps(own_rows(tokens=0)), "table 0: tokens must be a positive integer, is 0"),
        (json.dumps(own_rows(hidden="wide")), "table 0: hidden must be a positive integer, is 'wide'"),
        (json.dumps(own_rows(payload=8)), "table 0: payload must be a text"),
        (json.dumps(own_rows(us={"symm": -1})), "table 0: us must hold positive microseconds by backend"),
        (json.dumps(own_rows(us={"symm": 3.5})).replace("3.5", "1e999"), "1e999: expected a finite number"),
        (json.dumps(own_rows(us={"symm": math.nan})), "NaN: expected a finite number"),
        ("[" * 200_000, "about 200000 values|nested 200000 deep"),
        ("\xff\xfe\x00", "not valid JSON"),
        (json.dumps([{"kind": []}]), "table 0: kind must be one of"),
        *((json.dumps([{"kind": "experts", "sm": 90, "source": s, "rows": []}]), "table 0: sm must") for s in HOSTILE),
        (json.dumps([{"kind": "experts", "sm": 90, "source": "", "rows": [{"hidden": "".join(HOSTILE)}]}]), "table 0"),
    ],
)
def test_a_file_of_ones_own_that_is_none_is_an_error(tmp_path: Path, monkeypatch, content: str, complaint: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content, encoding="latin1")
    monkeypatch.setenv("EPRT_PLAN_ROWS", str(path))
    remedy = "let EPRT_PLAN_ROWS name another, or remove it if it was eprt tune's, which measures again"
    with pytest.raises(ConfigError, match=f"{path}: ({complaint}).*; {remedy}") as told:
        dispatch()
    assert len(str(told.value)) < 1000


def test_the_rows_that_come_with_eprt_keep_the_schema() -> None:
    assert complaint(TABLES) == ""
