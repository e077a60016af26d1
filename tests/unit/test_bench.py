"""The benches' arithmetic, their result format, and each command once on small sizes. Nothing here asserts a speed."""

from __future__ import annotations

import json

import pytest
import torch

from eprt.bench.dispatch import DispatchCase, DispatchTimes, dispatch_report, dispatch_row, transports
from eprt.bench.peers import PEERS
from eprt.bench.report import Report, percentile, slowest
from eprt.cli import main
from eprt.dispatch import DISPATCHERS
from eprt.errors import ConfigError


def test_percentile_is_the_nearest_rank() -> None:
    samples = [float(value) for value in range(100, 0, -1)]
    assert percentile(samples, 50) == 50
    assert percentile(samples, 99) == 99
    assert percentile(samples, 100) == 100
    assert percentile([7.0], 1) == percentile([7.0], 99) == 7.0


def test_the_slowest_rank_counts_round_by_round() -> None:
    assert slowest([[1.0, 5.0], [2.0, 3.0]]) == [2.0, 5.0]


def test_floor_counts_remote_rows_of_the_busiest_direction() -> None:
    """Two ranks: rank 0 keeps 3 tokens and sends 5; rank 1 sends 2. The busiest direction carries 5 rows."""
    case = DispatchCase("torch", hidden=64, top_k=2, tokens=8)
    by_rank = [DispatchTimes([10.0, 30.0], [3, 5], 1e-3), DispatchTimes([20.0, 10.0], [2, 8], 2e-3)]
    row = dispatch_row(case, by_rank, bytes_per_us=100.0)
    a_row = 2 * 64 + 8 * 2 + 2 * 64  # bf16 there, ids and weights, bf16 back
    assert row["remote_rows"] == 7
    assert row["remote_bytes"] == 7 * a_row
    assert row["floor_us"] == pytest.approx(5 * a_row / 100.0)
    assert (row["p50_us"], row["p99_us"]) == (20.0, 30.0)
    assert row["floor_share"] == pytest.approx(row["floor_us"] / 20.0, abs=1e-3)
    assert row["error"] == 2e-3
    packed = DispatchCase("torch", hidden=200, top_k=2, tokens=8, payload="fp8_block")
    assert packed.row_bytes() == 200 + 4 * 2 + 8 * 2 + 2 * 200


def test_a_refusal_becomes_one_note() -> None:
    cases = [DispatchCase("deepep", 2880, 4, tokens) for tokens in (1, 8)]
    refused = [DispatchTimes([], [0], refused="deep_ep is not installed")]
    kept: list[int] = []
    report = dispatch_report(cases, lambda case: refused, 1.0, keep=lambda report: kept.append(len(report.notes)))
    assert kept == [1, 1]
    assert report.rows == []
    assert report.notes == ["deepep, hidden 2880, top-4: deep_ep is not installed"]


def test_every_dispatcher_and_peer_is_measured_where_it_runs() -> None:
    assert transports("cpu") == ["none", "torch", "collectives by hand"]
    assert transports("cuda") == [*DISPATCHERS, *PEERS]


def test_report_carries_what_it_depends_on(tmp_path) -> None:
    path = tmp_path / "results" / "one.json"
    report = Report("dispatch", [{"tokens": 1}, {"tokens": 8}], {"push_gb_per_s": 1.5}, ["left out"])
    report.write(path)
    found = json.loads(path.read_text())
    assert found["rows"] == report.rows
    assert found["limits"] == report.limits
    assert found["notes"] == report.notes
    assert found["versions"]["torch"] == torch.__version__
    assert found["machine"]
    assert found["command"].split()[0] == "eprt"
    assert set(found) == {"bench", "time", "machine", "versions", "commit", "command", "limits", "notes", "rows"}


def test_bench_layer_on_cpu(tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    result, picture = tmp_path / "layer.json", tmp_path / "layer.png"
    words = ["bench", "layer", "--world", "2", "--device", "cpu", "--tokens", "0", "3"]
    assert main([*words, "--json", str(result), "--plot", str(picture)]) == 0
    rows = json.loads(result.read_text())["rows"]
    assert [row["tokens"] for row in rows] == [0, 3]
    for row in rows:
        assert row["pair"] == "torch + torch_grouped"
        assert row["overhead_us"] == pytest.approx(row["layer_p50_us"] - row["by_hand_p50_us"], abs=0.11)
        assert 0 < row["dispatch_p50_us"] <= row["dispatch_p99_us"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "the same steps by hand" in capsys.readouterr().out


def test_layer_and_hand_written_steps_compute_the_same() -> None:
    """The peer of the measurement does the layer's work: equal outputs, calls numbered in common."""
    from eprt.bench.layer import LayerCase, _by_hand, _make_layer
    from eprt.world import World

    with World.from_env(device="cpu") as world:
        torch.manual_seed(0)
        layer = _make_layer(world, LayerCase("tiny", 5))
        x = torch.randn(5, layer.config.input_size).to(torch.bfloat16)
        assert torch.equal(layer(x), _by_hand(layer, x))
        assert torch.equal(_by_hand(layer, x), layer(x))
        layer.close()


def test_bench_dispatch_on_cpu(tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "dispatch.svg"
    words = ["bench", "dispatch", "--world", "2", "--device", "cpu", "--tokens", "4", "--shapes", "h2880k4"]
    assert main([*words, "--json", "-", "--plot", str(picture)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {row["transport"] for row in report["rows"]} == {"none", "torch", "collectives by hand"}
    assert {row["routing"] for row in report["rows"]} == {"uniform", "hot_expert"}
    assert all(row["error"] <= 1e-2 for row in report["rows"])
    assert report["limits"]["push_gb_per_s"] > 0
    assert "<svg" in picture.read_text()


def test_wrong_sums_fail_the_bench(monkeypatch, capsys) -> None:
    from eprt.bench import dispatch

    monkeypatch.setattr(dispatch, "CHECK_TOLERANCE", -1.0)
    words = ["bench", "dispatch", "--device", "cpu", "--tokens", "2", "--shapes", "h2880k4", "--routings", "uniform"]
    assert main([*words, "--world", "2"]) == 1
    assert "returned wrong sums" in capsys.readouterr().out
    assert main([*words, "--world", "1"]) == 2
    assert "nothing would travel" in capsys.readouterr().err
    assert main([*words, "--transports", "torch", "carrier pigeon"]) == 2
    assert "'carrier pigeon': on cpu there are none, torch, collectives by hand" in capsys.readouterr().err


def test_bench_experts_without_a_gpu_says_so(capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "experts"]) == 2
    assert "no CUDA device here" in capsys.readouterr().err


def test_a_plot_that_cannot_be_written_is_a_config_error(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    from eprt.bench.plot import plot

    with pytest.raises(ConfigError, match=r"--plot .*picture\.txtx"):
        plot(Report("dispatch", []), tmp_path / "picture.txtx")
