"""The cost model: each measured row against the model without it, published results it wasn't fitted to, its counts."""

from __future__ import annotations

import itertools
import json
import random
from statistics import median

import pytest
import torch
from safetensors.torch import save_file

from eprt.balance import write_counts
from eprt.bench.routings import drawn, inclusion, read_routing
from eprt.bench.simulate import SimulatedWorld, simulated
from eprt.cli import main
from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.dispatch import DISPATCHERS
from eprt.errors import ConfigError, UsageError
from eprt.experts import EXECUTORS
from eprt.placement import ExpertPlacement
from eprt.plan import make_plan, model
from eprt.plan.fitting import Sample, fit_of
from eprt.plan.machines import MACHINES, linked_ranks, machine_of
from eprt.plan.model import ranks_of_a_token
from eprt.plan.skew import Demand, layer_time
from eprt.support import Device

H200 = Device("cuda", 90)


def fitted_together(executor: str) -> dict[str, list[Sample]]:
    """Its formats with rows enough; all of its rows, where a format has too few."""
    groups = model.experts_groups(executor)
    own = {key: samples for key, samples in groups.items() if key[1] and fit_of(samples, model.EXPERTS_LEAST)}
    if len(own) < len(groups) - 1:
        own[executor, "all"] = groups[executor, ""]
    return {" ".join(key): samples for key, samples in own.items()}


SAMPLES = {
    **{name: (list(model.dispatch_samples(name)), model.DISPATCH_LEAST) for name in DISPATCHERS},
    **{key: (found, model.EXPERTS_LEAST) for name in EXECUTORS for key, found in fitted_together(name).items()},
}
MEASURED = [name for name, (samples, _) in SAMPLES.items() if samples]


def dot(a, b) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", MEASURED)
def test_a_row_that_was_left_out_is_foretold(name: str) -> None:
    """Median within 15%, worst within 30%. Fitted anew here without the row, and the rows are in microseconds."""
    samples, least = SAMPLES[name]
    errors = []
    for left_out in samples:
        fit = fit_of([s for s in samples if s is not left_out], least)
        assert fit is not None
        errors.append(abs(dot(fit.coefficients, left_out.terms) / left_out.us - 1))
    assert median(errors) <= 0.15
    assert max(errors) <= 0.30
    stated = fit_of(samples, least)
    assert stated is not None
    assert (stated.median_error, stated.worst_error) == pytest.approx((median(errors), max(errors)), rel=1e-6)


def test_every_dispatcher_and_the_hopper_executors_were_fitted() -> None:
    hopper = {"torch_grouped", "triton_grouped", "humming", "cutlass_mxfp4"}
    assert set(DISPATCHERS) | hopper <= {name.split()[0] for name in MEASURED}


# DeepEP's own low-latency results on H800 with CX7 400 Gb/s NICs (its docs/legacy.md): microseconds of dispatch and
# combine, 128 tokens a rank, hidden 7168, top-8, FP8 tokens there. None of it was fitted to.
@pytest.mark.parametrize(("ranks", "us"), [(16, 118 + 195), (32, 155 + 273), (64, 173 + 314), (128, 561), (256, 554)])
def test_published_times_over_rdma_are_foretold(ranks: int, us: float) -> None:
    config, parallel = MoEConfig(256, 8, 7168, 2048), ParallelConfig(ranks, ranks_per_host=8)
    found = model.dispatch_estimate(DISPATCHERS["deepep"], config, parallel, 128, H200, "fp8_block")
    assert found is not None
    assert found.us == pytest.approx(us, rel=0.15)
    assert found.basis == "modelled"
    assert "not measured" in found.why
    assert "RDMA at an assumed rate" in found.why


def test_ranks_of_a_token_are_those_of_drawn_experts() -> None:
    draw = random.Random(0)
    for E, K, parallel in (
        (128, 4, ParallelConfig(4)),
        (256, 8, ParallelConfig(64)),
        (64, 6, ParallelConfig(8, moe_tp_size=2)),
    ):
        L = E // parallel.ep_size
        drawn = [len({e // L for e in draw.sample(range(E), K)}) * parallel.moe_tp_size for _ in range(4000)]
        config = MoEConfig(E, K, 2048, 512)
        assert model.ranks_of_a_token(config, parallel) == pytest.approx(sum(drawn) / len(drawn), rel=0.02)


def test_bytes_are_split_between_the_links_as_each_dispatcher_sends() -> None:
    """Counted by hand: 4 ranks on 2 hosts, 8 tokens each, two experts a token that lie on two ranks always."""
    config, parallel = MoEConfig(4, 4, 2048, 512), ParallelConfig(4, ranks_per_host=2)
    row = 2 * 2048 + 8 * 4 + 2 * 2048
    for name, near, far in (("none", 8 * 3, 8 * 2 / 2), ("torch", 8 * 1, 8 * 2), ("deepep", 8 * 1, 8 * 2)):
        sent = model.sent_by(DISPATCHERS[name], config, parallel, 8, H200, "bf16")
        assert (sent.link_bytes, sent.network_bytes) == (near * row, far * row), name


def test_links_of_hosts() -> None:
    assert linked_ranks(ParallelConfig(64), H200) == 64
    assert linked_ranks(ParallelConfig(64, ranks_per_host=8), H200) == 8
    assert linked_ranks(ParallelConfig(64, ranks_per_host=8), Device("cuda", 100)) == 64
    assert linked_ranks(ParallelConfig(128, ranks_per_host=8), Device("cuda", 100)) == 72


def test_a_generation_without_a_product_here_is_taken_as_the_one_before() -> None:
    assert machine_of(Device("cuda", 87)) is MACHINES[80]
    assert machine_of(Device("cuda", 61)) is None
    assert machine_of(Device("cpu")) is None


def test_more_work_never_takes_less() -> None:
    config = MoEConfig(256, 8, 7168, 2048, weight_format="nvfp4")
    parallel = ParallelConfig(16, ranks_per_host=8)
    sizes = (1, 8, 64, 512, 1024)
    for name, spec in DISPATCHERS.items():
        times = [model.dispatch_estimate(spec, config, parallel, tokens, H200, "bf16") for tokens in sizes]
        assert all(a and b and a.us < b.us for a, b in itertools.pairwise(times)), name
    for name, spec in EXECUTORS.items():
        if not spec.witness:
            times = [model.experts_estimate(spec, config, parallel, 16, tokens, H200) for tokens in sizes]
            assert all(a and b and a.us < b.us for a, b in itertools.pairwise(times)), name


def test_what_was_never_measured_is_called_assumed() -> None:
    config = MoEConfig(256, 8, 7168, 2048, weight_format="nvfp4")
    found = model.experts_estimate(EXECUTORS["trtllm_gen"], config, ParallelConfig(8), 32, 1024, Device("cuda", 100))
    assert found is not None
    assert (found.basis, found.here) == ("assumed", False)
    assert "never measured on any GPU" in found.why
    # Not the least of each coefficient: together they had no term left that grows with the rows.
    for executor, tokens in itertools.product(("trtllm_gen", "cutedsl_nvfp4"), (1, 128, 4096, 1 << 18)):
        b200, work = Device("cuda", 100), model.evenly(config, 32, tokens)
        found = model.experts_estimate(EXECUTORS[executor], config, ParallelConfig(8), 32, tokens, b200)
        machine = machine_of(b200)
        assert found
        assert machine
        assert found.us > max(model.peaks_us(config, "nvfp4", 1, *work, machine))
    assert model.experts_estimate(EXECUTORS["reference"], config, ParallelConfig(8), 32, 1024, H200) is None


DEEPSEEK = MoEConfig(256, 8, 7168, 2048, weight_format="fp8_block")


def test_experts_are_drawn_as_often_as_counted_and_once_a_token() -> None:
    counts = (700, 100, 90, 60, 30, 20, 0, 0)
    chances = inclusion(counts, 3)
    assert chances[0] == 1, "chosen by every token: it can't be chosen twice"
    left = [count / 300 * 2 for count in counts[1:]]
    assert chances[1:].tolist() == pytest.approx(left)
    ids = drawn(chances, 20_000, 3, torch.Generator().manual_seed(1))
    assert ids.shape == (20_000, 3)
    assert bool((ids.sort(1).values.diff(dim=1) > 0).all()), "twice in a row"
    found = ids.long().flatten().bincount(minlength=8) / len(ids)
    assert found.tolist() == pytest.approx(chances.tolist(), abs=0.02)  # five sigmas of 20,000 independent tokens


def test_pairs_of_experts_meet_whatever_their_numbers() -> None:
    """Systematic sampling in the experts' own order would never choose two neighbours."""
    ids = drawn(inclusion((1,) * 8, 2), 20_000, 2, torch.Generator().manual_seed(1)).sort(1).values
    pairs = (ids[:, 0] * 8 + ids[:, 1]).long().bincount(minlength=64)
    assert int((pairs > 0).sum()) == 28
    assert float(pairs[pairs > 0].max() / pairs[pairs > 0].min()) < 2  # an order lasts for 64 tokens


def test_zipf_with_a_seed_has_the_same_shares_in_another_order() -> None:
    plain, shuffled, other = (read_routing(f"zipf:1.1{seed}", 64, 4)[0].counts for seed in ("", ":0", ":1"))
    assert list(plain) == sorted(plain, reverse=True)
    assert sorted(shuffled) == sorted(other) == sorted(plain)
    assert len({plain, shuffled, other}) == 3


def test_recorded_ids_are_replayed_as_they_are(tmp_path) -> None:
    ids = torch.tensor([[0, 1], [2, 3], [0, 3]])
    save_file({"7": ids.to(torch.uint16), "3": ids + 2}, tmp_path / "ids.safetensors")
    third, seventh = read_routing(str(tmp_path / "ids.safetensors"), 6, 2)
    assert (third.layer, seventh.layer) == (3, 7)
    assert seventh.draw(5, 2, seed=0).tolist() == [[0, 1], [2, 3], [0, 3], [0, 1], [2, 3]]
    assert seventh.draw(2, 2, seed=1).tolist() == [[0, 3], [0, 1]]
    assert seventh.counts == (2, 1, 1, 2, 0, 0)
    write_counts(tmp_path / "c.json", {5: [3, 1, 0, 4]})
    assert read_routing(str(tmp_path / "c.json"), 4, 2)[0].counts == (3, 1, 0, 4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hot", "--routing 'hot': expected uniform, zipf"),
        ("uniform:3", "expected uniform"),
        ("zipf:steep", "could not convert .*; expected uniform, zipf:EXPONENT"),
        ("zipf:1.1:a", "expected uniform, zipf:EXPONENT"),
        ("zipf:25", r"zipf:25: layer 0 names fewer experts than a token chooses \(1 of 2\)"),
        ("zipf:-1", "an exponent from 0 to below 100"),
        ("zipf:1.1:99999999999999999999", "Overflow.*; expected uniform, zipf:EXPONENT"),
        ("{folder}/none.json", "none.json: can't be read"),
        ("{folder}/none.safetensors", "none.safetensors is no file of recorded ids"),
        ("{folder}/counts.json", "layer 5 is of 4 experts; asked for are 8, top-2"),
        ("{folder}/few.json", "names fewer experts than a token chooses"),
        ("{folder}/ids.safetensors", "layer 0 is of 8 experts, top-3; asked for are 8, top-2"),
        ("{folder}/floats.safetensors", "expected \\[N, K\\] ids named by a layer's number"),
        ("{folder}/complex.safetensors", "expected \\[N, K\\] ids named by a layer's number"),
        ("{folder}/names.safetensors", "expected \\[N, K\\] ids named by a layer's number"),
        ("{folder}/outside.safetensors", "names experts 1 to 8 of 8"),
        ("{folder}/empty.safetensors", "no layer in it"),
    ],
)
def test_what_is_no_routing(tmp_path, text: str, says: str) -> None:
    write_counts(tmp_path / "counts.json", {5: [3, 1, 0, 4]})
    write_counts(tmp_path / "few.json", {5: [3, *[0] * 7]})
    for name, tensors in {
        "ids": {"0": torch.tensor([[0, 1, 2]])},
        "floats": {"0": torch.ones(2, 2)},
        "complex": {"0": torch.ones(2, 2, dtype=torch.complex64)},
        "names": {"first": torch.tensor([[0, 1]])},
        "outside": {"0": torch.tensor([[1, 8]])},
        "empty": {},
    }.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    with pytest.raises(ConfigError, match=says):
        read_routing(text.format(folder=tmp_path), 8, 2)


def test_shares_of_slots_and_ranks_by_hand() -> None:
    """Two ranks of two slots; slot 4 is of no expert."""
    placement = ExpertPlacement(4, ParallelConfig(2))
    demand = Demand.of_slots(torch.tensor([[0, 1], [0, 2], [0, 4], [3, 2]]), placement)
    assert demand.slots == (0.75, 0.25, 0.5, 0.25)
    assert demand.ranks == (0.75, 0.5)
    assert demand.rows == (1.0, 0.75)
    assert demand.imbalance == pytest.approx(1 / 0.875)


def planned(dispatcher: str, world: int, tokens: int, config: MoEConfig = DEEPSEEK, per_host: int = 8):
    parallel = ParallelConfig(world, ranks_per_host=min(world, per_host))
    runtime = RuntimeConfig(dispatcher=dispatcher, executor="humming", max_tokens_per_rank=tokens)
    return parallel, make_plan(config, parallel, runtime, H200)


@pytest.mark.parametrize(
    ("dispatcher", "world", "tokens"), [("symm", 2, 512), ("torch", 16, 128), ("deepep", 64, 4096), ("none", 16, 128)]
)
def test_even_routing_takes_what_the_plan_says(dispatcher: str, world: int, tokens: int) -> None:
    """Also where the plan's time is a measured row."""
    parallel, plan = planned(dispatcher, world, tokens)
    placement = ExpertPlacement(256, parallel)
    share = ranks_of_a_token(DEEPSEEK, parallel) / world
    demand = Demand(placement, (8 / 256,) * 256, (share,) * world)
    found = layer_time(plan, DEEPSEEK, parallel, H200, demand)
    assert found is not None
    assert found.dispatch == pytest.approx(plan.chosen.dispatch.us)
    assert found.experts == pytest.approx(found.mean_experts) == pytest.approx(plan.chosen.experts.us)
    assert found.hottest_mb == pytest.approx(found.received_mb)


def test_rows_of_a_cpu_say_nothing_of_skew(tmp_path, monkeypatch) -> None:
    """No model of a CPU scales what `eprt tune` measured there."""
    sizes = {"hidden": 64, "top_k": 2, "tokens": 8}  # of all ranks, and near enough of each
    rows = {
        "dispatch": {"payload": "bf16", "ranks": 2, **sizes, "us": {"torch": 5.0}},
        "experts": {"weight_format": "bf16", "intermediate": 64, "local_experts": 4, "experts": 8, **sizes},
    }
    rows["experts"]["us"] = {"torch_grouped": 5.0}
    tables = [{"kind": kind, "sm": 0, "source": "here", "rows": [row]} for kind, row in rows.items()]
    (tmp_path / "plan.json").write_text(json.dumps(tables))
    monkeypatch.setenv("EPRT_PLAN_ROWS", str(tmp_path / "plan.json"))
    config, parallel, cpu = MoEConfig(8, 2, 64, 64), ParallelConfig(2), Device("cpu", 0)
    plan = make_plan(config, parallel, RuntimeConfig(max_tokens_per_rank=6), cpu)
    assert plan.chosen.us == 10.0
    demand = Demand.of_slots(torch.tensor([[0, 1], [2, 4]]), ExpertPlacement(8, parallel))
    assert layer_time(plan, config, parallel, cpu, demand) is None


def test_bytes_of_the_hottest_rank_by_hand() -> None:
    """4 ranks on 2 hosts, an expert each, top-2, 8 tokens on each rank; rank 0 gets every token."""
    config = MoEConfig(4, 2, 2048, 512, weight_format="mxfp4")
    row = (2 * 2048 + 8 * 2 + 2 * 2048) / 1e6
    for name in ("torch", "deepep"):
        parallel, plan = planned(name, 4, 8, config, per_host=2)
        demand = Demand(ExpertPlacement(4, parallel), (1.0, 0.5, 0.25, 0.25), (1.0, 0.5, 0.25, 0.25))
        found = layer_time(plan, config, parallel, H200, demand)
        assert found is not None
        assert found.hottest_mb == pytest.approx(8 * 3 * row)  # all tokens of the three others
        assert found.received_mb == pytest.approx(8 * 3 * row * 2 / 4)  # a token needs two ranks of four


def test_the_hottest_rank_sets_the_pace() -> None:
    parallel, plan = planned("deepep", 16, 1024)
    placement = ExpertPlacement(256, parallel)

    def us(hot: float) -> float:
        cold = (16 - hot) / 15
        slots = tuple(share * 8 / 256 for share in (*(hot,) * 16, *(cold,) * 240))
        found = layer_time(plan, DEEPSEEK, parallel, H200, Demand(placement, slots, (hot / 16,) * 16))
        assert found is not None
        return found.us

    times = [us(hot) for hot in (1.0, 1.5, 2.0, 4.0)]
    assert times == sorted(times)
    assert times[2] > 1.6 * times[0]
    demand = Demand(ExpertPlacement(8, ParallelConfig(2)), (0.0,) * 8, (0.0,) * 2)
    with pytest.raises(UsageError, match="a demand for 8 experts on 2 ranks: the layer has 256 on 16"):
        layer_time(plan, DEEPSEEK, parallel, H200, demand)


def test_replicas_cool_the_hottest_rank_down() -> None:
    def rows(**changes) -> dict[str, dict]:
        world = SimulatedWorld(DEEPSEEK, ParallelConfig(16, ranks_per_host=8), H200, "zipf:1.1:0", **changes)
        return {row["transport"]: row for row in simulated(world, 256) if not isinstance(row, str)}

    plain, shared, alone = rows(), rows(replicas=16), rows(replicas=16, one_replica=True)
    assert set(plain) == {"none", "torch", "deepep"}
    assert plain["torch"]["slots"] == 256
    assert shared["torch"]["slots"] == 272
    for name in ("torch", "deepep"):
        assert shared[name]["hottest_mb"] < 0.8 * plain[name]["hottest_mb"]
        assert shared[name]["us"] < 0.8 * plain[name]["us"]
    assert plain["none"]["dispatch_us"] == shared["none"]["dispatch_us"], "everybody gets everything"
    assert plain["torch"]["imbalance"] > alone["torch"]["imbalance"] > 1.5 > shared["torch"]["imbalance"]


def test_the_command(tmp_path, capsys) -> None:
    words = ["bench", "dispatch", "--simulate", "--ranks", "16", "--tokens", "8", "--model", "gpt-oss-120b"]
    file = tmp_path / "found.json"
    assert main([*words, "--replicas", "13", "--output", str(file)]) == 0
    out = capsys.readouterr().out
    assert "Simulated, not measured: 16 x sm90, 8 per host, one layer of gpt-oss-120b" in out
    assert out.count("--replicas 13: 16 slots beyond the 128 experts, so that each of 16 ranks has as many") == 1
    assert "left out: symm, 16 ranks of sm90: at most 8 ranks, the world has 16" in out
    found = json.loads(file.read_text())
    assert found["bench"] == "simulation"
    rows = found["rows"]
    assert len(rows) == 2 * 3 * 3  # routings, placements, dispatchers
    assert all(row["gain"] == 1 for row in rows if row["placement"] == "in order")
    for row in rows:
        assert row["us"] == pytest.approx(row["dispatch_us"] + row["experts_us"], abs=0.11)
        assert row["experts_us"] >= row["mean_experts_us"] > 0
    assert main([*words[:-2], "--ranks", "1"]) == 2
    assert main([*words, "--gpu", "cpu"]) == 2
    assert "nothing is known of a CPU's times" in capsys.readouterr().err
    assert main([*words, "--plot", str(tmp_path / "x.png")]) == 2
