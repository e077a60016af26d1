"""Counting experts' load, and what is made of the counts."""

from __future__ import annotations

import json
import random
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.jobs import balance_jobs as jobs

from eprt.balance import read_counts, report, weigh, write_counts, zipf
from eprt.balance.costs import modelled
from eprt.balance.planner import imbalance, plan_placement, rank_loads
from eprt.cli import main
from eprt.config import MAX_EXPERTS, Activation, MoEConfig, ParallelConfig
from eprt.errors import ConfigError
from eprt.placement import EMPTY, ExpertLoad, ExpertPlacement
from eprt.placement.file import PlacementFile
from eprt.plan.machines import machine_of
from eprt.plan.model import peaks_us
from eprt.support import Device

E, FLOOD = jobs.E, "x" * 100_211


@pytest.mark.parametrize("slots", [(), (*range(E), 3, 3, 0, 1)], ids=["plain", "replicas"])
def test_a_layer_counts_what_its_tokens_chose(pools, slots) -> None:
    found = pools(2).run(jobs.counted, slots=slots, steps=12)
    for counts, wanted, after, total, told in found:
        assert told.startswith("WorldMismatch: the ranks disagree about this call (fingerprint, layers)")
        assert counts == wanted
        assert sum(counts) > 50
        assert after == 0
        assert total == [[a + b for a, b in zip(found[0][1], found[1][1], strict=True)]] * 2


def test_who_does_not_count_says_so(pools) -> None:
    for *told, alone, none in pools(2).run(jobs.not_counted):
        assert none.startswith("ConfigError: gather_load got no layer")
        assert alone.startswith("ConfigError: layers is eprt.layer.ExpertParallelMoE: expected a sequence of")
        assert [text.partition(":")[0] for text in told] == ["UsageError"] * 3
        assert all("RuntimeConfig(count_load=True)" in text for text in told)


def test_ids_outside_are_not_counted_and_nothing_is_read() -> None:
    load = ExpertLoad(4, torch.device("cpu"))
    load.add(torch.tensor([[0, 3], [4, -1], [3, 9]], dtype=torch.int32))
    load.add(torch.empty(0, 2, dtype=torch.int32))
    before = load.read()
    assert before.tolist() == [1, 0, 0, 2]
    load.add(torch.tensor([[1, 1]], dtype=torch.int32))
    assert before.tolist() == [1, 0, 0, 2], "a copy"
    assert load.read().tolist() == [1, 2, 0, 2]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[", "is no file of expert counts"),
        ('{"layers": {"1": [1], "1": [2]}}', "is no file of expert counts.*'1'"),
        ("[]", "expected an object with format"),
        ('{"format": "eprt expert counts", "version": 2}', "version 1"),
        ('{"format": "eprt expert counts", "version": 1, "layers": {}}', "missing or empty"),
        ('{"format": "eprt expert counts", "version": 1, "layers": {"x": [1]}}', "layer 'x'"),
        pytest.param(
            f'{{"format": "eprt expert counts", "version": 1, "layers": {{"{"1" * 5000}": [1]}}}}',
            "layer '1",
            id="long",
        ),
        ('{"format": "eprt expert counts", "version": 1, "layers": {"1": [1], "01": [2]}}', "layer '01'"),
        ('{"format": "eprt expert counts", "version": 1, "layers": {"1": [1, -1]}}', "layer 1: .*none negative"),
        ('{"format": "eprt expert counts", "version": 1, "layers": {"1": [1.5]}}', "layer 1"),
    ],
)
def test_what_is_no_file_of_counts(tmp_path, text: str, says: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_counts(path)
    with pytest.raises(ConfigError, match=r"none.json: can't be read"):
        read_counts(tmp_path / "none.json")


def test_zipf_is_what_it_says() -> None:
    assert zipf(3, 1.0, 1100) == (600, 300, 200)
    assert set(zipf(4, 0.0)) == {250_000}
    with pytest.raises(ConfigError, match=r"exponent -1.*an exponent from 0 to below 100"):
        zipf(4, -1.0)
    with pytest.raises(ConfigError, match=r"over 1000000000000 experts .*: expected 1 to 65536 experts"):
        zipf(10**12, 1.0)
    with pytest.raises(ConfigError, match=r"-3 in all: expected .* a total from 0 on"):
        zipf(8, 1.0, -3)
    assert len(zipf(65536, 1.0)) == 65536  # in time linear in them


@given(
    counts=st.lists(st.integers(0, 1000), min_size=1, max_size=24),
    ranks=st.sampled_from([1, 2, 4, 8]),
    more=st.integers(0, 12),
    data=st.data(),
)
def test_every_plan_is_a_placement(counts, ranks, more, data) -> None:
    E, parallel = len(counts), ParallelConfig(ranks)
    num_slots = -(-(E + more) // ranks) * ranks
    domain = data.draw(st.sampled_from([n for n in (1, 2, 4, 8) if n <= ranks]))
    plan = plan_placement(counts, parallel, num_slots, domain_size=domain)
    L = num_slots // ranks
    held = [[e for e in plan.slots[start : start + L] if e != EMPTY] for start in range(0, num_slots, L)]
    assert all(len(set(each)) == len(each) for each in held), "two replicas on one rank"
    by_hand = [sum(counts[e] / len(plan.replicas[e]) for e in each) for each in held]
    assert rank_loads(counts, plan) == pytest.approx(by_hand)
    assert sum(by_hand) == pytest.approx(sum(counts))
    # A rank carries what is left at the mean at least; whatever fits can't be better than that.
    assert max(by_hand) >= sum(counts) / ranks - 1e-6
    if domain == ranks:  # never hotter than a third above the best that any packing could do, as LPT promises
        best = max(sum(counts) / ranks, max(counts) / ranks)
        assert max(by_hand) <= 4 / 3 * best + max(counts[e] / len(plan.replicas[e]) for e in range(E))
    for slot, expert in enumerate(plan.slots):
        if expert != EMPTY and len(plan.replicas[expert]) > 1:
            fewer = ExpertPlacement(E, parallel, (*plan.slots[:slot], EMPTY, *plan.slots[slot + 1 :]))
            assert max(rank_loads(counts, fewer)) > max(by_hand), "a replica that cools nothing"
    again = plan_placement(counts, parallel, num_slots, current=plan, domain_size=domain)
    assert again.slots == plan.slots, "nothing moves where nothing changed"


@pytest.mark.parametrize(
    ("E", "ranks", "slots"), [(128, 2, 144), (128, 4, 144), (256, 64, 320), (8, 4, 12), (8, 1, 9), (4, 4, 4)]
)
def test_even_experts_get_no_replica(E, ranks, slots) -> None:
    plan = plan_placement([7] * E, ParallelConfig(ranks), slots)
    L = slots // ranks
    assert [L - plan.slots[start : start + L].count(EMPTY) for start in range(0, slots, L)] == [E // ranks] * ranks
    assert plan_placement([0] * E, ParallelConfig(ranks), slots).slots.count(EMPTY) == slots - E


def test_experts_that_are_about_even_stay_in_order() -> None:
    counts = [1000 + 7 * (expert * 37 % 11) for expert in range(32)]
    plan = plan_placement(counts, ParallelConfig(4), 40)
    in_order = [expert for rank in range(4) for expert in (*range(8 * rank, 8 * rank + 8), EMPTY, EMPTY)]
    assert list(plan.slots) == in_order
    counts[0] *= 3
    assert plan_placement(counts, ParallelConfig(4), 40).slots != plan.slots


def test_ranks_that_experts_do_not_fill_evenly_get_replicas() -> None:
    counts, parallel = [3] * 4, ParallelConfig(3)
    assert max(rank_loads(counts, plan_placement(counts, parallel, 6))) < max(
        rank_loads(counts, ExpertPlacement(4, parallel))
    )


@pytest.mark.parametrize(("exponent", "most", "filled"), [(0.3, 8, 1.0004), (0.6, 7, 1.0010), (1.1, 31, 1.0291)])
def test_few_replicas_do_nearly_what_all_of_them_do(exponent, most, filled) -> None:
    """`filled`: max/mean that a replica in each of the 64 spare slots came to."""
    counts, parallel = list(zipf(256, exponent)), ParallelConfig(64, ranks_per_host=8)
    random.Random(1).shuffle(counts)
    plan = plan_placement(counts, parallel, 320)
    assert 0 < 64 - plan.slots.count(EMPTY) <= most
    assert imbalance(rank_loads(counts, plan)) <= 1.02 * filled


def test_a_hot_expert_gets_replicas_that_go_when_it_cools_and_nothing_travels() -> None:
    parallel, counts = ParallelConfig(4), [800, *[100] * 7]
    now = plan_placement(counts, parallel, 12)
    near = plan_placement([100] * 8, parallel, 12, current=now)
    assert len(now.replicas[0]) == 4, "one a rank, no more"
    assert imbalance(rank_loads(counts, ExpertPlacement(8, parallel))) == pytest.approx(900 / 375)
    assert imbalance(rank_loads(counts, now)) < 1.1
    assert near.slots.count(EMPTY) == 4
    assert all(new in (old, EMPTY) for new, old in zip(near.slots, now.slots, strict=True))


def test_few_experts_travel_for_a_small_change() -> None:
    parallel, counts = ParallelConfig(8), list(zipf(64, 1.0))
    now = plan_placement(counts, parallel, 80)
    counts[40] *= 20
    fresh, near = plan_placement(counts, parallel, 80), plan_placement(counts, parallel, 80, current=now)
    moved = [sum(a not in (b, EMPTY) for a, b in zip(plan.slots, now.slots, strict=True)) for plan in (fresh, near)]
    assert moved[1] <= 15 < moved[0] / 3
    assert max(rank_loads(counts, near)) <= 1.02 * max(rank_loads(counts, fresh))


@pytest.mark.parametrize(
    ("counts", "now", "hottest"),
    [
        ([7] * 4, (2, 3, 1, 3, 3, 0), 28 / 3),  # evener than the greedy plan: that isn't what it becomes
        ([28, 3, 17, 27, 46], (4, 3, 1, 4, 0, 2), 46),  # experts in order are cooler than that plan
        ([2, 2, 9, 3], (0, 3, 3, 1, 2, 2), 6),  # a rank's second replica of an expert carries nothing
    ],
)
def test_a_plan_near_what_holds_is_as_cool_as_either(counts, now, hottest) -> None:
    parallel = ParallelConfig(3)
    near = plan_placement(counts, parallel, 6, current=ExpertPlacement(len(counts), parallel, now))
    assert max(rank_loads(counts, near)) <= 1.02 * hottest + 1e-9
    assert all(near.slots[slot] != near.slots[slot + 1] for slot in (0, 2, 4) if near.slots[slot] != EMPTY)


@pytest.mark.parametrize("parallel", [ParallelConfig(5, ranks_per_host=2), ParallelConfig(20, 1, 4, 10)])
def test_hosts_that_hold_no_equal_shares_are_planned_for(parallel) -> None:
    """3 + 2 ranks, or experts of 4 slices on hosts of 10."""
    assert imbalance(rank_loads([5, 4, 3, 2, 1], plan_placement([5, 4, 3, 2, 1], parallel, 10))) < 1.2


def test_hosts_are_balanced_first() -> None:
    counts = list(zipf(16, 0.8))
    plan = plan_placement(counts, ParallelConfig(4), 16, domain_size=2)
    loads = rank_loads(counts, plan)
    assert imbalance([loads[0] + loads[1], loads[2] + loads[3]]) < 1.02
    known = plan_placement(counts, ParallelConfig(4, ranks_per_host=2), 16)
    assert known.slots == plan.slots


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"counts": []}, "counts of 0 experts"),
        ({"counts": [1, -1]}, r"counts of 2 experts, \[-1\] among them"),
        ({"counts": [1.0, float("nan"), 2.0, 3.0]}, r"\[nan\] among them"),
        ({"num_slots": 3}, "3 slots for 4 experts on 2 ranks"),
        ({"num_slots": 2}, "2 slots for 4 experts"),
        ({"num_slots": 10**8}, "100000000 slots for 4 experts on 2 ranks: expected a multiple of 2, 4 to 65536"),
        ({"domain_size": 0}, "domain_size 0"),
        ({"current": ExpertPlacement(4, ParallelConfig(2), (0, 1, 2, 3))}, "expected 4 in 6 on 2"),
    ],
)
def test_what_cannot_be_planned(wrong, says: str) -> None:
    given = {"counts": [4, 3, 2, 1], "parallel": ParallelConfig(2), "num_slots": 6} | wrong
    with pytest.raises(ConfigError, match=says):
        plan_placement(**given)


def test_thousands_of_slots_are_planned_within_seconds() -> None:
    """256 slots a rank: all pairs of two ranks' experts, weighed one by one, took 40 s."""
    parallel, started = ParallelConfig(64), time.process_time()
    plan = plan_placement(zipf(256, 1.1), parallel, 8192)
    assert imbalance(rank_loads(zipf(256, 1.1), plan)) < 1.03
    assert time.process_time() - started < 15


def test_placements_come_back_from_their_file(tmp_path) -> None:
    parallel = ParallelConfig(2)
    placements = {
        3: ExpertPlacement(4, parallel, (3, 2, 1, 0)),
        None: ExpertPlacement(4, parallel, (0, 1, 2, 3, 0, EMPTY)),
    }
    PlacementFile.of_placements(placements).write(tmp_path / "p.json")
    with pytest.raises(ConfigError, match="layer '-1': expected a layer's number"):
        PlacementFile.of_placements({-1: placements[3]}).write(tmp_path / "p.json")
    found = PlacementFile.read(tmp_path / "p.json")
    assert found.placement(3, 4, parallel) == placements[3]
    assert found.placement(4, 4, parallel) == placements[None]
    kept = {0: (3, 2, 1, 0), None: (0, 1, 2, 3)}
    assert len({PlacementFile(4, 2, dict(rows)).fingerprint for rows in (kept.items(), reversed(kept.items()))}) == 1
    with pytest.raises(ConfigError, match="for 4 experts, layer 3 has 8"):
        found.placement(3, 8, parallel)
    with pytest.raises(ConfigError, match="for 2 expert-parallel ranks, layer 3 has 4"):
        found.placement(3, 4, ParallelConfig(4))
    with pytest.raises(ConfigError, match="has no layer 1: it has 3"):
        PlacementFile(4, 2, {3: (3, 2, 1, 0)}).placement(1, 4, parallel)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": "x"}, "no placement file"),
        ({"num_experts": True}, "num_experts is True"),
        ({"ep_size": 0}, "ep_size is 0"),
        ({"layers": []}, "layers is missing or empty"),
        ({"layers": {"one": [0, 1]}}, "layer 'one'"),
        ({"layers": {"1": [0, 1], "01": [1, 0]}}, "layer '01'"),
        ({"layers": {"1": [0, 1.0]}}, "layer 1: expected a list"),
        ({"layers": {"1": [0, 0]}}, r"layer 1: experts \[1\] have no slot"),
        ({"layers": {"1": [0, 1, 2, 2]}}, r"layer 1: slots name experts \[2\]"),
        ({"num_experts": 2**26}, f"num_experts {2**26}: expected at most {MAX_EXPERTS}"),
        ({"ep_size": 2**40}, "expected at most"),
        ({"layers": {"9" * 100_211: [0, 1]}}, "expected a layer's number"),
        ({"layers": {f"\x1b]0;mine\x07{FLOOD}": [0, 1]}}, "expected a layer's number"),
        ({"num_experts": FLOOD}, "expected a whole number"),
        ({"layers": {"all": list(range(100_000))}}, r"slots name experts \[2, 3.*99998 of them"),
        ({"num_experts": 60_000, "layers": {"all": [0, 0]}}, r"experts \[1, 2.*59999 of them"),
        ({"layers": {"all": [10**30]}}, "an integer of 31 digits"),
        ({"layers": [[[]] * 700_000]}, "values: expected at most 1000000"),
    ],
)
def test_what_is_no_placement_file(tmp_path, changes, says: str) -> None:
    """Whatever it holds, the message is short and comes soon."""
    path, started = tmp_path / "p.json", time.process_time()
    right = {"format": "eprt expert placement", "version": 1, "num_experts": 2, "ep_size": 2, "layers": {"1": [0, 1]}}
    path.write_text(json.dumps(right))
    assert PlacementFile.read(path).layers == {1: (0, 1)}
    path.write_text(json.dumps(right | changes))
    with pytest.raises(ConfigError, match=says) as told:
        PlacementFile.read(path)
    assert str(path) in str(told.value)
    assert len(str(told.value)) < 1000
    assert time.process_time() - started < 2


def test_the_report_says_which_rank_is_hot(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    parallel = ParallelConfig(2)
    plain, spread = ExpertPlacement(4, parallel), ExpertPlacement(4, parallel, (0, 1, 2, 0, 3, EMPTY))
    found = report([[6, 1, 1, 2], [6, 1, 1, 2]], [plain, spread], [3, 5])
    assert [row.loads for row in found.layers] == [(7, 3), (5, 5)]
    assert [row.imbalance for row in found.layers] == pytest.approx([1.4, 1.0])
    assert (found.worst.layer, found.worst.hot_rank, found.worst.hot_expert, found.worst.hot_share) == (3, 0, 0, 0.6)
    assert found.mean == pytest.approx(1.2)
    assert "    3     1.400             0" in str(found)
    found.plot(tmp_path / "b.png")
    assert (tmp_path / "b.png").stat().st_size > 1000
    with pytest.raises(ConfigError, match=r"b\.xyz"):
        found.plot(tmp_path / "b.xyz")
    with pytest.raises(ConfigError, match="counts of 1 layers, 2 placements"):
        report([[1, 1, 1, 1]], [plain, spread])
    assert report([[0.6, 0.1, 0.1, 0.2]], [plain]).worst.imbalance == pytest.approx(1.4)


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ([1, 2], "counts of 2 experts: expected one for each of 4"),
        ([1, 2, 3, 4, 5], "counts of 5 experts"),
        ([1, -2, 3, 4], r"\[-2(\.0)?\] among them"),
    ],
)
def test_counts_that_are_none_of_the_layers_are_refused(counts, says: str) -> None:
    place, config = ExpertPlacement(4, ParallelConfig(2)), MoEConfig(4, 1, 128, 128, weight_format="bf16")
    with pytest.raises(ConfigError, match=says):
        rank_loads(counts, place)
    with pytest.raises(ConfigError, match=f"layer 0: .*{says}"):
        report([counts], [place])
    with pytest.raises(ConfigError, match=says):
        weigh(config, counts, place, place, 50, time=lambda rows, experts: rows)
    with pytest.raises(ConfigError, match=r"expected numbers \[layers, E\]"):
        report(counts, [place])


def test_placements_of_other_sizes_are_not_weighed() -> None:
    config, two = MoEConfig(4, 1, 128, 128), ParallelConfig(2)
    right = ExpertPlacement(4, two)
    for other in (ExpertPlacement(8, two), ExpertPlacement(4, ParallelConfig(4))):
        with pytest.raises(ConfigError, match=r"placements of \(experts, ranks\) .*for the layer's 4 experts"):
            weigh(config, [1] * 4, right, other, 50, time=rows_alone)


GPT_OSS = MoEConfig(128, 4, 2880, 2880, Activation(alpha=1.702, beta=1.0, limit=7.0), bias=True, weight_format="mxfp4")


@pytest.mark.parametrize(
    ("tokens", "one_replica", "pays"), [(8192, False, True), (8, False, False), (8, True, False), (1, True, False)]
)
def test_replicas_pay_where_rows_set_the_time_and_not_where_weights_do(tokens, one_replica, pays) -> None:
    counts, parallel = [200, *[100] * 127], ParallelConfig(4)
    before, after = ExpertPlacement(128, parallel), plan_placement(counts, parallel, 132)
    if pays:
        counts = list(zipf(128, 1.1))
        after = plan_placement(counts, parallel, 132)
    time = modelled(GPT_OSS, parallel, "humming", Device("cuda", 90))
    verdict = weigh(GPT_OSS, counts, before, after, tokens, one_replica=one_replica, time=time)
    assert verdict.pays is pays, verdict
    # One slot more a rank: 3 matrices of 2880 x 2880 at 4.25 bits.
    assert verdict.more_bytes == round(3 * 2880**2 * 4.25 / 8)


def rows_alone(rows: float, _: float) -> float:
    return rows


def test_the_estimate_is_the_slowest_ranks() -> None:
    parallel = ParallelConfig(2)
    config = MoEConfig(4, 1, 128, 128, weight_format="bf16")
    before = ExpertPlacement(4, parallel)
    after = ExpertPlacement(4, parallel, (0, 2, 1, 3))
    verdict = weigh(config, [30, 30, 20, 20], before, after, 50, time=rows_alone)
    assert (verdict.before_s, verdict.after_s) == pytest.approx((60, 50))
    assert verdict.imbalance_before == pytest.approx(1.2)
    assert verdict.gain == pytest.approx(1 / 6)
    assert verdict.break_even_calls == pytest.approx(verdict.move_s / 10)
    assert weigh(config, [1, 1, 1, 1], before, before, 50, time=rows_alone).break_even_calls == float("inf")


def test_the_models_time_grows_with_rows_and_with_experts() -> None:
    h200 = Device("cuda", 90)
    found = modelled(GPT_OSS, ParallelConfig(4), "humming", h200)
    assert 0 < found(8, 8) < found(8, 32) < found(30_000, 32)
    # Above the makers' peaks in both regimes, and not by an order of magnitude.
    for rows, experts in ((8, 32), (100_000, 32)):
        assert 1 < found(rows, experts) * 1e6 / max(peaks_us(GPT_OSS, "mxfp4", 1, experts, rows, machine_of(h200))) < 5
    with pytest.raises(ConfigError, match="nothing is known of times on cpu"):
        modelled(GPT_OSS, ParallelConfig(4), "humming", Device("cpu"))


def test_plan_experts_writes_a_file_that_it_reads_again(tmp_path, capsys) -> None:
    counts, first, again = tmp_path / "c.json", tmp_path / "p.json", tmp_path / "q.json"
    write_counts(counts, {0: zipf(16, 1.0), 2: zipf(16, 0.5)})
    words = ["plan-experts", "--counts", str(counts), "--slots", "20", "--world", "4"]
    assert main([*words, "--out", str(first), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["mean_after"] < 1.05 < 1.3 < said["mean_before"]
    assert said["pays"] is None
    placed = PlacementFile.read(first)
    assert placed.layers == {row["layer"]: tuple(row["slots"]) for row in said["layers"]}
    assert main([*words, "--current", str(first), "--out", str(again)]) == 0
    assert PlacementFile.read(again) == placed, "nothing changed, so nothing moves"
    assert "max/mean on average" in capsys.readouterr().out
    assert main([*words, "--out", "/dev/full"]) == 74
    assert "eprt: No space left on device: /dev/full" in capsys.readouterr().err


def test_plan_experts_knows_models_by_name(capsys) -> None:
    words = ["plan-experts", "--slots", "36", "--world", "4", "--json"]
    assert main([*words, "--model", "gpt-oss-20b"]) == 0
    assert len(json.loads(capsys.readouterr().out)["layers"]) == 24
    assert main([*words, "--model", "gpt-oss-121b"]) == 2
    assert "known are" in capsys.readouterr().err


def test_plan_experts_says_when_it_does_not_pay(tiny, tmp_path, capsys) -> None:
    words = ["plan-experts", "--model", str(tiny), "--slots", "16", "--world", "4"]
    assert main([*words, "--tokens", "100000"]) == 0
    assert "It pays at 100000 tokens per rank, prefill" in capsys.readouterr().out
    assert main([*words, "--tokens", "2"]) == 0
    assert "It does not pay at 2 tokens per rank" in capsys.readouterr().out
    assert main([*words, "--tokens", "100000", "--zipf", "0"]) == 0
    said = capsys.readouterr().out
    assert "It does not pay at 100000 tokens per rank, prefill: without replicas the ranks are as even" in said
    assert "8 slots or more stay empty in each layer" in said
    assert main(["plan-experts", "--slots", "16"]) == 2
    assert "nothing to plan for" in capsys.readouterr().err
    sizes = {"num_hidden_layers": 1, "mlp_only_layers": [0]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **sizes}))
    assert main(["plan-experts", "--slots", "16", "--model", str(tmp_path)]) == 2
    assert "config.json: the qwen3_moe model has no MoE layers" in capsys.readouterr().err
    for more, says in (
        (["--experts", "4"], "--experts 4: --model says how many there are"),
        (["--counts", "no.json", "--zipf", "0.5"], "--zipf 0.5 stands for counts, and --counts names them"),
    ):
        assert main([*words, *more]) == 2
        assert says in capsys.readouterr().err
    assert main(["plan-experts", "--slots", "16", "--experts", "8", "--phase", "decode", "--tokens", "4"]) == 2
    assert "--tokens 4 --phase decode: of the estimate" in capsys.readouterr().err
    assert main([*words[:3], "--slots", "7"]) == 2
    assert "7 slots for 8 experts" in capsys.readouterr().err
    assert main([*words, "--tokens", "0"]) == 2
    assert "--tokens 0: must be a positive integer" in capsys.readouterr().err
