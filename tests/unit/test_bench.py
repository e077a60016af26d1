"""The benches' arithmetic, their result format, and each command once on small sizes. Nothing here asserts a speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.stand_ins import deepep as deepep_stand_in

from eprt.bench import layer, placed, report
from eprt.bench.baselines import baselines
from eprt.bench.dispatch import DispatchCase, DispatchTimes, dispatch_rows, measure_dispatch, transports
from eprt.bench.plot import plot
from eprt.bench.report import Report, percentile, slowest
from eprt.bench.routings import read_routing
from eprt.bench.step import StepCase, StepFound, StepTimes, step_rows
from eprt.bench.timing import first_samples, samples
from eprt.cli import bench as bench_command
from eprt.cli import main
from eprt.cli.arguments import Bench
from eprt.cli.terminal import Terminal
from eprt.config import MoEConfig, RuntimeConfig
from eprt.conformance import transport
from eprt.conformance.cases import Batch
from eprt.dispatch import DISPATCHERS, deepep
from eprt.dispatch.none import AllGatherDispatcher
from eprt.errors import ConfigError
from eprt.ranks.process import RankContext
from eprt.tokens import TopK
from eprt.world import World

BASELINES = baselines().TRANSPORTS
CPU = ("--world", "2", "--device", "cpu")


def test_percentile_is_the_nearest_rank_and_the_slowest_rank_counts_round_by_round() -> None:
    samples = [float(value) for value in range(100, 0, -1)]
    assert [percentile(samples, share) for share in (50, 99, 100)] == [50, 99, 100]
    assert percentile([7.0], 1) == percentile([7.0], 99) == 7.0
    assert slowest([[1.0, 5.0], [2.0, 3.0]]) == [2.0, 5.0]


def test_floors_count_remote_rows_of_the_busiest_direction_and_medians_the_slower_rank() -> None:
    """Two ranks: rank 0 keeps 3 tokens and sends 5; rank 1 sends 2. The busiest direction carries 5 rows. Dispatch
    alone has samples of its own: 4, 6 and 9 on the slower rank of each round."""
    case = DispatchCase("torch", hidden=64, top_k=2, tokens=8)
    first = DispatchTimes([10.0, 30.0], [3, 5], 1e-3, dispatch=[4.0, 1.0, 2.0])
    second = DispatchTimes([20.0, 10.0], [2, 8], 2e-3, dispatch=[3.0, 6.0, 9.0])
    [row] = dispatch_rows(case, [first, second], bytes_per_us=100.0)
    there = 2 * 64 + 8 * 2  # bf16, ids and weights
    assert row["remote_rows"] == 7
    assert row["remote_bytes"] == 7 * (there + 2 * 64)
    assert row["floor_us"] == pytest.approx(5 * (there + 2 * 64) / 100.0)
    assert (row["p50_us"], row["p99_us"], row["dispatch_us"]) == (20.0, 30.0, 6.0)
    assert row["dispatch_floor_us"] == pytest.approx(5 * there / 100.0)
    assert row["floor_share"] == pytest.approx(row["floor_us"] / 20.0, abs=1e-3)
    assert row["error"] == 2e-3
    baseline = [DispatchTimes([20.0], [0, 5]), DispatchTimes([20.0], [5, 0])]
    assert dispatch_rows(case, baseline, bytes_per_us=100.0)[0]["dispatch_us"] is None
    packed = DispatchCase("torch", hidden=200, top_k=2, tokens=8, payload="fp8_block")
    assert packed.row_bytes() == 200 + 4 * 2 + 8 * 2 + 2 * 200


def test_a_slow_combine_counts_in_the_round_trip_alone(monkeypatch) -> None:
    slow_us, combine = 20_000, AllGatherDispatcher._combine

    def slow(*arguments):
        time.sleep(slow_us / 1e6)
        return combine(*arguments)

    monkeypatch.setattr(AllGatherDispatcher, "_combine", slow)
    context = RankContext(0, 1, "cpu")
    found = measure_dispatch(context, DispatchCase("none", 64, 2, 4))
    context.close()
    assert len(found.dispatch) == len(found.samples)
    assert 0 < percentile(found.dispatch, 50) < slow_us <= percentile(found.samples, 50)


class Tape:
    """A GPU's clock in microseconds, and what a graph captured of it."""

    PEER = 100.0  # what the first kernel of a graph waits for a rank that launches its own later
    EVENT = 2.0  # what an event that a graph records costs before and after it

    def __init__(self, monkeypatch) -> None:
        self.now, self.wait, self.tape = 0.0, 0.0, None
        tape = self

        class Event:
            def __init__(self, enable_timing: bool, external: bool = False) -> None:
                assert enable_timing
                self.external, self.at = external, None

            def record(self) -> None:
                assert self.external or tape.tape is None, "an event that a capture takes for a dependency has no time"
                cost = tape.EVENT if self.external else 0.0
                tape.kernel(cost)
                tape.run(lambda: setattr(self, "at", tape.now))
                tape.kernel(cost)

            def elapsed_time(self, end) -> float:
                return (end.at - self.at) / 1e3

        @contextmanager
        def capture(graph):
            self.tape = graph.works = []
            yield
            self.tape = None

        def replay(graph) -> None:
            self.wait = self.PEER
            for work in graph.works:
                work()

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "graph", capture)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", type("Graph", (), {"replay": replay}))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: self.kernel(1.0))

    def run(self, work) -> None:
        work() if self.tape is None else self.tape.append(work)

    def kernel(self, us: float) -> None:
        def work() -> None:
            self.now, self.wait = self.now + self.wait + us, 0.0

        self.run(work)


class Hashable(SimpleNamespace):
    __hash__ = object.__hash__


@pytest.mark.parametrize("graph", [True, False])
def test_times_between_events_of_the_gpu_begin_when_all_ranks_are_there(monkeypatch, graph) -> None:
    tape = Tape(monkeypatch)
    world = Hashable(device=torch.device("cuda"), size=2, group=None, barrier=lambda: None)
    number = SimpleNamespace(add_=lambda _: tape.kernel(1.0))
    monkeypatch.setattr(torch, "zeros", lambda *size, device: number)

    def first() -> str:
        tape.kernel(3.0)
        return "sent"

    def rest(found: str) -> None:
        assert found == "sent"
        tape.kernel(10.0)

    settings = {"graph": graph, "rounds": 4, "repeats": 5}
    assert first_samples(world, first, rest, **settings) == pytest.approx([3.0] * 4)
    assert samples(world, lambda: rest(first()), **settings) == pytest.approx(
        [13.0 + (2 * tape.EVENT / 5 if graph else 0)] * 4
    )


@pytest.mark.parametrize("H", [2048, 2880])
def test_the_bare_deepep_does_in_each_call_what_its_user_has_to(monkeypatch, H) -> None:
    """Its tokens and ids are read anew; where the library lacks their width, padded and trimmed, else sent as is."""
    T, K, E = deepep_stand_in.CAPACITY, 3, 8
    deepep_stand_in.install(monkeypatch)
    monkeypatch.setitem(sys.modules, "deep_ep", deepep.load_library())
    monkeypatch.setattr(baselines().transports, "_require", lambda name: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    if H in DISPATCHERS["deepep"].hidden_sizes:
        monkeypatch.setattr(torch.nn.functional, "pad", None)
    world = SimpleNamespace(group=deepep_stand_in.Group(deepep_stand_in.Fabric(1), 0), size=1)
    hidden = torch.randn(T, H).to(torch.bfloat16)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).to(torch.int32)
    topk = TopK(ids, torch.rand(T, K))
    with BASELINES["deepep by hand"].make(world, MoEConfig(E, K, H, 32), hidden, topk) as call:
        for _ in range(2):
            out = call()
            expected = transport.weighted_sums(Batch(hidden, topk), torch.ones(E), None)
            assert out.shape == (T, H)
            assert out.is_contiguous()
            assert torch.allclose(out.double(), expected, rtol=1e-2, atol=1e-2)
            hidden.neg_()
            ids.copy_(ids.roll(1, 0))


def test_a_refusal_becomes_one_note(monkeypatch) -> None:
    def broken(config, world, runtime):
        raise ConfigError("its kernels can't be loaded\nstack")

    monkeypatch.setattr(layer, "random_layer", broken)
    context = RankContext(0, 1, "cpu")
    carried = [DispatchCase("deepep", 2880, 4, tokens) for tokens in (1, 8)]
    layers = [layer.LayerCase("tiny", (1,), RuntimeConfig("none", "torch_grouped"))]
    kept: list[int] = []
    report = Report("any", [], notes=["x"])
    workers = SimpleNamespace(run=lambda job, case: [job(context, case)])
    monkeypatch.setattr(bench_command, "keep", lambda *_: lambda report: kept.append(len(report.notes)))
    for cases, job in ((carried, measure_dispatch), (layers, layer.measure_layer)):
        bench_command.measured(report, cases, job, None, workers, None, Terminal(speaks=False))
    pairs, [why] = layer.pairs_here(context, layer.LayerCase("tiny", (1,), RuntimeConfig("auto", "triton_grouped")))
    context.close()
    assert pairs == []
    assert "triton_grouped: runs on cuda, not on cpu" in why
    assert kept == [2, 2, 3]
    assert report.rows == []
    assert report.notes == [
        "x",
        "deepep, hidden 2880, top-4: runs on cuda, not on cpu",
        "tiny, none + torch_grouped: its kernels can't be loaded",
    ]


@pytest.mark.parametrize(("dispatcher", "named"), [("auto", "none + torch_grouped: "), ("none", "")])
def test_a_pair_that_fails_to_warm_up_is_named(monkeypatch, dispatcher: str, named: str) -> None:
    def fails(*layers) -> None:
        raise ConfigError("no memory")

    monkeypatch.setattr(World, "warmup", fails)
    context = RankContext(0, 1, "cpu")
    found = layer.measure_layer(context, layer.LayerCase("tiny", (1,), RuntimeConfig(dispatcher, "torch_grouped")))
    context.close()
    assert found == f"{named}no memory"


def test_every_dispatcher_and_peer_is_measured_where_it_runs() -> None:
    assert transports("cpu") == ["none", "torch", "collectives by hand"]
    assert transports("cuda") == [*DISPATCHERS, *BASELINES]


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time is of interest here."""
    monkeypatch.setattr("eprt.ranks.process._loaded", ["support.jobs.few_rounds"])


def bench(name: str, folder: Path, *words: str) -> dict[str, Any]:
    """The result file of a bench on two gloo ranks. It draws a picture, too, into `picture.png`."""
    pytest.importorskip("matplotlib")
    files = ["--output", str(folder / "result.json"), "--plot", str(folder / "picture.png")]
    assert main(["bench", name, *CPU, *words, *files[: 2 if name == "exchange" else 4]]) == 0
    return json.loads((folder / "result.json").read_text())


def test_a_pipe_gets_one_report() -> None:
    reader, writer = os.pipe()
    arguments, found = Bench(output=Path(f"/dev/fd/{writer}")), Report("layer", [])
    bench_command.keep(arguments, Terminal(json=True))(found)
    assert bench_command.finish(found, arguments, Terminal(json=True)) == 2
    os.close(writer)
    with open(reader) as pipe:
        assert json.loads(pipe.read())["bench"] == "layer"


def test_every_pair_of_a_layer_is_measured_or_left_out(tmp_path, capsys) -> None:
    found = bench("layer", tmp_path, "--tokens", "0", "3", "--executor", "torch_grouped", "--every-pair")
    pairs = [(row["pair"], row["token_format"], row["tokens"]) for row in found["rows"]]
    flat = [("none + torch_grouped", "flat"), ("torch + torch_grouped", "flat")]
    pairs_wanted = [*flat, ("torch + torch_grouped", "expert_major")]
    assert pairs == [(*pair, tokens) for pair in pairs_wanted for tokens in (0, 3)]
    for row in found["rows"]:
        assert row["rows_per_expert"] == row["tokens"] * 2 * 4 / 8
        assert row["overhead_us"] == pytest.approx(row["layer_p50_us"] - row["by_hand_p50_us"], abs=0.11)
        assert 0 < row["dispatch_p50_us"] <= row["dispatch_p99_us"]
    assert any(note.startswith("tiny, symm + torch_grouped: symm: runs on cuda, not on cpu") for note in found["notes"])
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "the same steps by hand" in out
    assert out.count("torch + torch_grouped  expert_major") == 4  # in both tables
    # A result carries what it depends on.
    assert set(found) == {"bench", "time", "machine", "versions", "commit", "command", "limits", "notes", "rows"}
    assert found["versions"]["torch"] == torch.__version__
    assert found["machine"]
    assert found["command"].split()[0] == "eprt"


def test_the_commit_is_never_that_of_a_project_around_the_package(tmp_path, monkeypatch) -> None:
    """A virtual environment often lies in somebody's checkout."""
    installed = tmp_path / "venv" / "eprt" / "bench" / "report.py"
    installed.parent.mkdir(parents=True)
    installed.touch()
    monkeypatch.setattr(report, "__file__", str(installed))
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "theirs"]):
        subprocess.run([*git, *words], check=True)
    assert report.commit() == ""
    subprocess.run([*git, "add", "."], check=True)
    assert len(report.commit()) == 41  # and "+"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("layer --shapes huge", "shape 'huge': expected one of gpt-oss-120b"),
        ("layer --tokens -3", "expected at least one number, none below"),
        ("layer --tokens 8 100000000000000", "none below 0 or above 1048576"),
        ("step --tokens 1048577", "none below 1 or above 1048576"),
        ("layer --tokens", "expected at least one number, none below"),
        ("layer --tokens 8 --replicas 2", "say which, --routing"),
        ("layer --routing zipf:1 --replicas 2 --placement x.json", "give one of them"),
        ("layer --routing zipf:1 --every-pair", "name one pair"),
        ("layer --routing zipf:1 --replicas -2", "expected replicas from 0 on"),
        ("layer --routing zipf:1 --world 1", "there is no other rank"),
        ("layer --routing zipf:1 --placement /no/such.json", "no/such.json: can't be read"),
        ("exchange --world 1", ""),
        ("dispatch --tokens 8 0", "expected at least one number, none below"),
        ("dispatch --world 1", "nothing would travel"),
        ("dispatch --transports torch pigeon", "'pigeon': on cpu there are none, torch, collectives by hand"),
        ("dispatch --model gpt-oss-120b", "are of worlds that are simulated: add --simulate"),
        ("dispatch --simulate", "--payload are of what is measured: --simulate takes --ranks"),
        ("layer --shapes", "--shapes: expected at least one name"),
        ("layer --executor pigeon", "executor 'pigeon' doesn't exist; choose from"),
        ("step --dispatcher pigeon", "dispatcher 'pigeon' doesn't exist; choose from"),
        ("step --layers 0", ""),
        ("step --tokens 0", ""),
    ],
)
def test_what_a_bench_cannot_measure_is_refused(words: str, says: str, capsys) -> None:
    name, *rest = words.split()
    assert main(["bench", name, *CPU, *rest]) == 2
    assert says in capsys.readouterr().err


def test_a_bench_that_measured_nothing_ends_with_2(capsys) -> None:
    assert main(["bench", "layer", *CPU, "--tokens", "1", "--executor", "triton_grouped"]) == 2
    said = capsys.readouterr()
    assert "left out: " in said.out
    assert said.err.endswith("eprt: nothing could be measured: what was left out says why\n")


def test_a_planned_placement_beside_experts_in_order(tmp_path, capsys) -> None:
    """On two gloo ranks, neighbours hot: rank 0 has most rows until they are spread."""
    words = ("--routing", "zipf:1.1", "--replicas", "1", "--low-precision-activations")
    found = bench("layer", tmp_path, "--tokens", "200", *words)
    assert found["bench"] == "placement"
    plain, planned = found["rows"]
    assert [plain[key] for key in ("placement", "slots", "gain", "activations")] == ["in order", 8, 1.0, "fp8"]
    assert (planned["placement"], planned["slots"], planned["phase"]) == ("planned", 10, "prefill")
    assert plain["imbalance"] > 1.3 > 1.1 > planned["imbalance"] >= 1
    assert planned["gain"] == pytest.approx(plain["layer_p50_us"] / planned["layer_p50_us"], abs=1e-3)
    assert 0 <= planned["error"] <= 1e-2
    assert planned["predicted_us"] is None, "nothing is known of a CPU's times"
    said = capsys.readouterr().out
    assert "with replicas where they were planned" in said
    assert "--replicas 1: 2 slots beyond the 8 experts, so that each of 2 ranks has as many" in said


def test_sums_that_a_placement_changed_fail_the_bench(monkeypatch, capsys) -> None:
    """Where each layer drew experts of its own, as where one held another slot's weights."""

    choices = {"routed": read_routing("uniform", 8, 4)[0], "routing": "uniform"}
    case = placed.PlacedCase("tiny", (4,), RuntimeConfig(), **choices, slots=(*reversed(range(8)),))
    context = RankContext(0, 1, "cpu")
    right = placed.measure_placed(context, case)
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)
    wrong = placed.measure_placed(context, case)
    context.close()
    assert right.error <= placed.TOLERANCE < wrong.error
    assert placed.placed_rows(case, [right] * 3)[0]["slots"] == 9, "8 experts on three ranks leave a slot empty"
    monkeypatch.setattr("eprt.cli.bench_layer.TOLERANCE", -1.0)
    assert main(["bench", "layer", *CPU, "--tokens", "2", "--routing", "uniform"]) == 1
    assert "sums differ by" in capsys.readouterr().out


def test_bench_exchange_on_cpu(tmp_path, capsys) -> None:
    rows = {row["exchange"]: row for row in bench("exchange", tmp_path, "--rounds", "40")["rows"]}
    assert set(rows) == {"gloo", "shared", "step"}
    assert all(0 < row["p50_us"] <= row["p99_us"] for row in rows.values())
    assert "Agreement of the ranks" in capsys.readouterr().out


def test_layer_and_hand_written_steps_compute_the_same() -> None:
    """The peer of the measurement does the layer's work: equal outputs, calls numbered in common."""
    with World.from_env(device="cpu") as world:
        torch.manual_seed(0)
        case = layer.LayerCase("tiny", (5,), RuntimeConfig())
        ours = layer.random_layer(case.config, world, case.runtime)
        x = torch.randn(5, ours.config.input_size).to(torch.bfloat16)
        assert torch.equal(ours(x), layer._called_directly(ours, x))
        assert torch.equal(layer._called_directly(ours, x), ours(x))
        ours.close()


def test_bench_dispatch_on_cpu(tmp_path, capsys, monkeypatch) -> None:
    """A second run, in which no sum is near enough, fails."""
    words = ("--tokens", "4", "--shapes", "h2880k4")
    report = bench("dispatch", tmp_path, *words)
    assert {row["transport"] for row in report["rows"]} == {"none", "torch", "collectives by hand"}
    assert {row["routing"] for row in report["rows"]} == {"uniform", "hot_expert"}
    errors = {name: [r["error"] for r in report["rows"] if r["transport"] == name] for name in ("none", "torch")}
    assert all(0 < error <= 1e-2 for found in errors.values() for error in found)
    raw = {row["error"] for row in report["rows"] if row["transport"] not in errors}
    assert raw == {None}, "raw copies sum nothing"
    for row in report["rows"]:
        assert row["dispatch_us"] is None if row["transport"] in BASELINES else row["dispatch_us"] > 0
        assert 0 < row["dispatch_floor_us"] < row["floor_us"]
    assert report["limits"]["push_gb_per_s"] > 0
    together, alone = (table.splitlines()[1].split() for table in capsys.readouterr().out.split("\nDispatch ")[1:3])
    assert together[:7] == ["tokens", "remote", "MB", "floor", "none", "torch", "collectives"]
    assert alone == ["tokens", "floor", "none", "torch"]
    monkeypatch.setattr("eprt.cli.bench_dispatch.CHECK_TOLERANCE", -1.0)
    assert main(["bench", "dispatch", *CPU, *words, "--routings", "uniform", "--transports", "none"]) == 1
    assert "returned wrong sums" in capsys.readouterr().out


def test_a_plot_that_cannot_be_written_says_why(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match=r"--plot .*picture\.txtx"):
        plot(Report("dispatch", []), tmp_path / "picture.txtx")
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):  # no configuration: exit code 74
        plot(Report("dispatch", []), Path("/dev/full"))


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--output", "{}/a.file/result.json"], 74, "Not a directory: {}/a.file/result.json"),
        (["--output", "{}"], 74, "Is a directory: {}"),
        (["--plot", "{}/a.file/picture.png"], 74, "Not a directory: {}/a.file/picture.png"),
        (["--plot", "{}/picture.txtx"], 2, "--plot {}/picture.txtx: Format 'txtx' is not supported"),
        (["--plot", "{}/picture.png"], 2, "plots need matplotlib: pip install 'eprt[plot]'"),
    ],
)
def test_files_that_cannot_be_written_are_refused_before_anything_is_measured(
    tmp_path, monkeypatch, capsys, words: list[str], code: int, says: str
) -> None:
    pytest.importorskip("matplotlib")
    if "matplotlib" in says:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    (tmp_path / "a.file").touch()
    monkeypatch.setattr("eprt.bench.router.router_report", lambda *_, **__: pytest.fail("measured"))
    assert main(["bench", "router", *(word.format(tmp_path) for word in words)]) == code
    assert says.format(tmp_path) in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [tmp_path / "a.file"]


def test_a_step_counts_its_slowest_rank_and_stands_beside_its_peers() -> None:
    case = StepCase("tiny", layers=2, tokens=(4,))

    def rank(eager: float, graph: float, ours: float) -> StepFound:
        times = [("transformers", eager), ("transformers graph", graph), ("in a step", ours)]
        return StepFound(
            [StepTimes(4, path, [us] * 3, [us / 2] * 3, [us / 8] * 5) for path, us in times], "none + torch_grouped", []
        )

    eager, graph, ours = step_rows(case, [rank(100.0, 40.0, 60.0), rank(80.0, 50.0, 20.0)])
    assert [row["step_p50_us"] for row in (eager, graph, ours)] == [100.0, 50.0, 60.0]
    assert (ours["of_eager"], ours["of_graph"], eager["of_graph"]) == (0.6, 1.2, None)
    assert (ours["host_us"], ours["host_us_per_layer"], ours["moe_host_us"]) == (30.0, 15.0, 7.5)
    assert (eager["pair"], ours["pair"]) == ("", "none + torch_grouped")


def phases_within_blocks(row) -> bool:
    """Tells whether the host's time in each phase fits that of a block, twice as long at most."""
    if row["path"] == "transformers":
        return True
    phases = [row[f"{phase}_host_us"] for phase in ("route", "dispatch", "experts", "combine")]
    return all(0 < us < row["moe_host_us"] * 2 for us in phases)


def test_bench_step_on_gloo_ranks(tmp_path, capsys) -> None:
    """Everything but the rows in graphs."""
    pytest.importorskip("transformers", reason="pip install 'eprt[transformers]'")
    for _ in range(3):  # blocks and phases are timed one after the other: what a busy machine delays, once more
        found = bench("step", tmp_path, "--layers", "1", "--tokens", "1", "3", "--rounds", "1")
        if all(phases_within_blocks(row) for row in found["rows"]):
            break
    rows = {(row["tokens"], row["path"]): row for row in found["rows"]}
    assert rows.keys() == {(tokens, path) for tokens in (1, 3) for path in ("transformers", "eager", "in a step")}
    for (_, path), row in rows.items():
        assert row["step_p50_us"] >= row["host_us"] > 0
        assert row["moe_host_us"] > 0
        ours = path != "transformers"
        assert bool(row["pair"]) is ours
        assert phases_within_blocks(row)
    assert found["notes"] == ["tiny: graphs: a CPU world has none"]
    assert (tmp_path / "picture.png").stat().st_size > 0
    assert "of eager" in capsys.readouterr().out
