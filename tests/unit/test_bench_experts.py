"""The expert bench without a GPU: its cases are real layers, its random weights pass the layer's own checks, what a
library called directly computes is what the executors do."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from support.cases import expert_cases as cases

from eprt.bench import experts as bench
from eprt.bench import router, shapes
from eprt.bench.baselines import baselines
from eprt.bench.experts import Ceilings, choose_cases, experts_report, random_experts, random_matrix
from eprt.bench.routings import sample_ids, sampled_tokens
from eprt.bench.shapes import SHAPES, ExpertShape, shape_of
from eprt.cli import main
from eprt.config import Activation, MoEConfig, ParallelConfig, RuntimeConfig
from eprt.conformance.oracle import relative_error, shard_weights
from eprt.errors import ConfigError, EprtError
from eprt.experts import EXECUTORS
from eprt.experts.reference import ReferenceExecutor, decode_matrix
from eprt.placement import ExpertPlacement
from eprt.support import Device
from eprt.weights import Dense, Nvfp4

CPU = torch.device("cpu")
LIBRARIES = baselines()
TorchOrder = LIBRARIES.direct.TorchOrder


@pytest.mark.parametrize("weight_format", ["mxfp4", "nvfp4", "int4", "fp8_block", "fp8_channel", "bf16"])
def test_random_weights_are_the_configs(weight_format):
    config = MoEConfig(8, 2, 256, 96, Activation(limit=10.0), bias=True, weight_format=weight_format)
    shard = ExpertPlacement(8, ParallelConfig(4)).shard(0)
    weights = random_experts(config, shard.num_local_experts, CPU)
    weights.check(config, shard)
    values = decode_matrix(weights.gate_up, 2)
    assert values.isfinite().all()
    assert 0.1 < values.std() * 256**0.5 < 10
    if isinstance(weights.gate_up, Nvfp4) and isinstance(weights.down, Nvfp4):  # Blackwell's executors need these
        assert weights.gate_up.input_scale is not None
        assert weights.down.input_scale is not None


def test_unknown_names_and_machines_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match="fp8_tensor"):
        random_matrix("fp8_tensor", 1, 128, 128, 1, CPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device here"):
        experts_report(tokens=[1])
    with pytest.raises(ConfigError, match="--routing 'hot': expected uniform"):
        experts_report(tokens=[1], routing="hot")
    with pytest.raises(ConfigError, match="expected one of gpt-oss-120b"):
        router.router_report(["gpt"], tokens=[1])
    with pytest.raises(ConfigError, match="no CUDA device"):
        router.router_report(tokens=[1])
    monkeypatch.setattr(bench, "baselines", lambda: None)
    with pytest.raises(ConfigError, match=r"'vllm triton': expected none; baselines: .* EPRT_BASELINES can name"):
        experts_report(tokens=[1], libraries=["vllm triton"])
    assert main(["bench", "experts"]) == main(["bench", "router", "--tokens", "0"]) == 2


@pytest.mark.parametrize("device", ["sm90", "sm100"])
def test_every_executor_but_the_witness_is_measured_or_left_out_with_its_reason(device):
    cases, left_out = choose_cases(SHAPES, None, RuntimeConfig(), Device.parse(device))
    pairs = [(case.executor, case.shape) for case in cases]
    refused = [tuple(line.split(":")[0].split(" on ")) for line in left_out]
    everything = {(name, shape) for name in EXECUTORS for shape in SHAPES if name != "reference"}
    assert len(pairs) + len(refused) == len(everything)
    assert {*pairs, *refused} == everything
    assert all(line.split(": ", 1)[1] for line in left_out)


def test_a_models_own_experts_are_a_shape_whole_or_cut(tmp_path):
    hf = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}
    hf |= {"hidden_size": 64, "moe_intermediate_size": 96, "hidden_act": "silu", "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    whole, apart, sliced = (shape_of(f"{tmp_path}{cut}") for cut in ("", ":ep4", ":tp3"))
    assert (whole.config.num_experts, whole.config.intermediate_size, whole.ep_size) == (8, 96, 1)
    assert (apart.config, apart.ep_size) == (whole.config, 4)
    assert (sliced.config, sliced.ep_size) == (replace(whole.config, intermediate_size=32), 1)
    assert shape_of("deepseek-v3:tp8").config.weight_format == "fp8_block"
    assert shape_of("Qwen3-30B-A3B-GPTQ-Int4:tp2").group == 128
    for cut, said in ((":ep3", "8 experts don't divide by 3"), (":tp7", "96 intermediate columns don't divide by 7")):
        with pytest.raises(ConfigError, match=said):
            shape_of(f"{tmp_path}{cut}")


def test_the_cases_of_each_generation():
    def found(device: str, shape: str) -> dict[str, str]:
        cases, _ = choose_cases([shape], None, RuntimeConfig(), Device.parse(device))
        return {case.executor: case.config.weight_format for case in cases}

    # An executor that decodes at load is timed with what it then computes with.
    # What the plan waits to see measured is measured, too.
    mxfp4 = dict.fromkeys(("humming", "cutlass_mxfp4", "triton_grouped"), "mxfp4")
    assert found("sm90", "gpt-oss-120b") == {"torch_grouped": "bf16", **mxfp4}
    nvfp4 = {"torch_grouped": "bf16", "cutedsl_nvfp4": "nvfp4", "trtllm_gen": "nvfp4"}
    assert found("sm100", "deepseek-v3-nvfp4") == nvfp4
    _, left_out = choose_cases(["deepseek-v3-fp8"], ["cutlass_mxfp4"], RuntimeConfig(), Device.parse("sm90"))
    assert left_out == ["cutlass_mxfp4 on deepseek-v3-fp8: takes mxfp4 weights, not fp8_block"]
    for layers, executors, message in ((["gpt-6"], None, "shape 'gpt-6'"), (SHAPES, ["marlin"], "executor 'marlin'")):
        with pytest.raises(ConfigError, match=message):
            choose_cases(layers, executors, RuntimeConfig(), Device.parse("sm90"))


def test_the_report_its_table_and_what_was_left_out(monkeypatch, capsys):
    """A dash where there is no baseline."""
    columns = {"tokens": 1, "rows_per_expert": 1.0, "weights_us": 1.0, "flops_us": 0.0, "ratio": 7.5, "host_us": 128.0}
    row = {"executor": "torch_grouped", "shape": "gpt-oss-120b", "weight_format": "bf16", "us": 9.5, **columns}
    row |= {"by_hand_us": None, "library_us": None}
    with_baselines = row | {"executor": "humming", "us": 7.5, "by_hand_us": 8.25, "library_us": 7.125}
    monkeypatch.setattr(bench, "cuda_device", lambda name: CPU)
    monkeypatch.setattr(bench.Ceilings, "measure", lambda device: Ceilings(4.25678e12, 8e14))
    rows = [with_baselines, row]
    monkeypatch.setattr(bench, "_bench_executor", lambda case, *rest: rows if case.executor == "torch_grouped" else [])
    kept: list[int] = []
    given = {"tokens": [1], "libraries": ["none"]}
    report = experts_report(["gpt-oss-120b"], **given, keep=lambda report: kept.append(len(report.rows)))
    assert kept == [2]
    assert report.rows == [{**row, "routing": "uniform"} for row in rows]
    zipf = experts_report(["gpt-oss-120b"], **given, routing="zipf:1.1:0")
    assert {row["routing"] for row in zipf.rows} == {"zipf:1.1:0"}, "a result says how it was routed"
    assert report.limits == {"copy_gb_per_s": 4256.8, "bf16_tflop_per_s": 800.0}
    assert "humming on gpt-oss-120b: runs on cuda, not on cpu" in report.notes
    assert len(report.notes) == len(EXECUTORS) - 2
    report.notes.clear()  # they name executors, too
    monkeypatch.setattr(bench, "experts_report", lambda *_, **__: report)
    assert main(["bench", "experts"]) == 0
    words = [line.replace("|", " ").split() for line in capsys.readouterr().out.splitlines()]
    [humming], [grouped] = ([line for line in words if name in line] for name in ("humming", "torch_grouped"))
    assert humming[4:7] == ["7.5", "8.25", "7.125"]
    assert grouped[4:7] == ["9.5", "-", "-"]


@pytest.mark.parametrize(("activations", "us"), [("bf16", 8.0), ("fp8", 4.0)])
def test_the_floor_is_of_the_arithmetic_that_is_allowed(activations, us):
    """FP8's own rate where tokens may be FP8, on devices that have one: 16 x 32 x 3 x 2 operations a row."""
    case = bench.ExpertCase(
        "triton_grouped", "deepseek-v3-fp8", replace(TINY_BF16, hidden_size=32, intermediate_size=16)
    )
    flat = sampled_tokens(case.config, 8, CPU)
    rows = int((flat.ids < case.shard.num_local_experts).sum())
    rate = rows * 2 * 3 * 16 * 32 / 8e-6
    with_fp8, without = Ceilings(1e30, rate, 2 * rate), Ceilings(1e30, rate)
    assert bench._row(case, 1, with_fp8, activations, flat, {"us": 16.0})["flops_us"] == us
    assert bench._row(case, 1, with_fp8, activations, flat, {"us": 16.0})["ratio"] == 16.0 / us
    assert bench._row(case, 1, without, activations, flat, {"us": 16.0})["flops_us"] == 8.0


def test_sampled_routing_is_distinct_even_and_repeatable():
    ids = sample_ids(4000, 4, 32, CPU)
    assert ids.dtype == torch.int32
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert torch.equal(ids, sample_ids(4000, 4, 32, CPU))
    counts = torch.bincount(ids.flatten(), minlength=32)
    assert counts.min() > 400
    assert counts.max() < 600


def direct_case(rank):
    """(the reference on a rank's two of eight experts, tokens). Ids of nobody and of other ranks; NaN weights."""
    config = cases.make_config(num_experts=8, top_k=3, bias=True)
    shard = cases.shard_of(config, rank, 4)
    flat = replace(cases.make_flat(config, 40), every_row_read=True)
    weights = shard_weights(cases.make_weights(config), config, shard)
    return ReferenceExecutor(config, shard, weights, CPU, cases.RUNTIME), flat


def by_torch(reference, flat, dtype):
    """The experts by `TorchOrder`, in front of the reference's own matrices; rows nobody computes hold NaN."""
    order = TorchOrder(tuple(flat.ids.shape), reference.shard, CPU)
    offsets, place, foreign = order.sort(flat.ids)
    (N, K), hidden = flat.ids.shape, flat.hidden.data
    rows, results = (torch.full((N * K + extra, hidden.shape[1]), cases.NAN) for extra in (0, 1))
    inside = place < N * K
    rows[place[inside]] = hidden.repeat_interleave(K, 0)[inside]
    for e in range(reference.shard.num_local_experts):
        mine = slice(int(offsets[e]), int(offsets[e + 1]))
        results[mine] = reference._expert(e, rows[mine])
    return order.sum_back(results.to(dtype), place, foreign, flat.weights)


def bag_of_cuda(place, results, bags, *, mode, per_sample_weights, padding_idx):
    """torch's CUDA kernel: a row left out is read, replaced by zero and multiplied by its weight like any other."""
    assert (mode, per_sample_weights.dtype) == ("sum", results.dtype)
    values = torch.where((place == padding_idx)[:, None], 0, results[place]).float()
    weighted = values * per_sample_weights[:, None].float()
    return weighted.view(len(bags), -1, results.shape[1]).sum(1).to(results.dtype)


@pytest.mark.parametrize("bag", [torch.nn.functional.embedding_bag, bag_of_cuda], ids=["cpu", "cuda"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("rank", range(4))
def test_sorting_and_summing_by_torch_give_the_layer(monkeypatch, rank, dtype, bound, bag):
    monkeypatch.setattr(torch.nn.functional, "embedding_bag", bag)
    reference, flat = direct_case(rank)
    weights = flat.weights.clone()
    found, expected = by_torch(reference, flat, dtype), reference(flat)
    assert found.dtype == dtype
    assert relative_error(found, expected) < bound
    assert not found[4::5].any()
    LIBRARIES.check_direct(found, expected)
    assert torch.equal(flat.weights.nan_to_num(), weights.nan_to_num()), "the caller's weights were written to"
    nobody = replace(flat, ids=torch.full_like(flat.ids, 8))
    assert not by_torch(reference, nobody, dtype).any()


def test_what_computes_something_else_is_no_baseline():
    reference, flat = direct_case(1)
    expected = reference(flat)
    shuffled = replace(flat, weights=flat.weights.flip(0))
    for other in (by_torch(reference, shuffled, torch.float32), expected * 1.02, expected + cases.NAN):
        with pytest.raises(EprtError, match="differs from the executor"):
            LIBRARIES.check_direct(other, expected)
    LIBRARIES.check_direct(torch.zeros(3, 4), torch.zeros(3, 4))
    with pytest.raises(EprtError, match="differs from the executor"):
        LIBRARIES.check_direct(torch.ones(3, 4), torch.zeros(3, 4))
    assert LIBRARIES.direct_call(reference, flat) is None


def test_the_host_reads_nothing_of_what_torch_sorts():
    """A graph's capture would end: on `meta` there are no values to read."""
    config = cases.make_config(num_experts=8, top_k=3)
    meta = torch.device("meta")
    order = TorchOrder((5, 3), cases.shard_of(config, 1, 4), meta)
    offsets, place, foreign = order.sort(torch.empty(5, 3, dtype=torch.int32, device=meta))
    assert (offsets.shape, place.shape, foreign.shape) == ((3,), (15,), (15,))
    results = torch.empty(16, 96, dtype=torch.bfloat16, device=meta)
    assert order.sum_back(results, place, foreign, torch.empty(5, 3, device=meta)).shape == (5, 96)


def test_all_three_are_timed_in_turn(monkeypatch):
    """Twice, and the smaller counts; an executor without a library has its own time alone."""
    reference, flat = direct_case(0)
    direct_call = LIBRARIES.direct_call
    times = iter([5.0, 7.0, 3.0, 4.0, 8.0, 2.0, 6.0, 1.0])
    monkeypatch.setattr(bench, "device_microseconds", lambda call: (call(), next(times))[1])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    called = []
    by_hand = lambda: (called.append("hand"), reference(flat))[1]  # noqa: E731
    monkeypatch.setattr(LIBRARIES, "direct_call", lambda executor, tokens: by_hand)
    reference.library_call = lambda tokens: lambda: called.append("bare")
    assert list(bench._times(reference, flat).values())[:3] == [4.0, 7.0, 2.0]
    assert called == ["hand", "hand", "bare", "hand", "bare"]
    del reference.library_call
    monkeypatch.setattr(LIBRARIES, "direct_call", direct_call)
    assert list(bench._times(reference, flat).values())[:3] == [1.0, None, None]
    monkeypatch.setattr(LIBRARIES, "direct_call", lambda executor, tokens: lambda: 2 * reference(flat))
    with pytest.raises(EprtError, match="differs from the executor"):
        bench._times(reference, flat)


TINY_BF16 = MoEConfig(8, 3, 64, 32)


def tiny_case(rank: int = 1):
    torch.manual_seed(0)
    shard = ExpertPlacement(8, ParallelConfig(2)).shard(rank)
    weights = bench.random_experts(TINY_BF16, 4, CPU)
    return shard, weights, sampled_tokens(TINY_BF16, 24, CPU)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_block_of_transformers_computes_this_ranks_share(rank: int) -> None:
    pytest.importorskip("transformers", minversion="5.17")
    shard, weights, flat = tiny_case(rank)
    with LIBRARIES.EXPERTS["transformers grouped_mm"].make(TINY_BF16, shard, weights, CPU) as call_for:
        found = call_for(flat)()
    LIBRARIES.check_experts(TINY_BF16, shard, weights, flat, found)
    wrong = replace(weights, gate_up=Dense(weights.gate_up.data.flip(1)))  # up before gate
    with pytest.raises(EprtError, match="its sums differ from the reference"):
        LIBRARIES.check_experts(TINY_BF16, shard, wrong, flat, found)


def test_other_libraries_are_measured_where_they_are_or_left_out_with_the_reason(monkeypatch) -> None:
    """On a CPU with a clock of its own: rows for what runs there, a reason for what doesn't or breaks."""
    pytest.importorskip("transformers", minversion="5.17")
    monkeypatch.setattr(bench, "cuda_device", lambda name: CPU)
    monkeypatch.setattr(bench.Ceilings, "measure", lambda device: Ceilings(1e12, 1e14))
    monkeypatch.setattr(bench, "choose_cases", lambda *_: ([], []))
    monkeypatch.setattr(bench, "device_microseconds", lambda call: (call(), 5.0)[1])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    small = ExpertShape(TINY_BF16, 2)
    packed = ExpertShape(replace(TINY_BF16, weight_format="mxfp4"), 2)
    monkeypatch.setattr(shapes, "SHAPES", {"small": small, "packed": packed})
    kept: list[int] = []
    report = experts_report(["small", "packed"], tokens=[8, 16], keep=lambda report: kept.append(len(report.rows)))
    assert [(row["executor"], row["tokens"], row["us"]) for row in report.rows] == [
        ("transformers grouped_mm", 8, 5.0),
        ("transformers grouped_mm", 16, 5.0),
    ]
    [hot] = experts_report(["small"], tokens=[16], libraries=["transformers grouped_mm"], routing="zipf:4").rows
    assert hot["rows_per_expert"] > report.rows[1]["rows_per_expert"]
    for row in report.rows:
        assert row["rows_per_expert"] > 1
        assert row["by_hand_us"] is row["library_us"] is None
        assert row["host_us"] > 0
    assert kept[-1] == 2
    assert "transformers grouped_mm on packed: takes bf16 weights, not mxfp4" in report.notes
    assert "\nvllm triton on small: runs on cuda from sm80 to sm999, not on cpu" in "\n".join(["", *report.notes])

    def breaks(*_):
        raise RuntimeError("no such symbol\nstack")

    monkeypatch.setattr(LIBRARIES, "check_experts", breaks)
    report = experts_report(["small"], tokens=[8], libraries=["transformers grouped_mm"])
    assert (report.rows, report.notes) == ([], ["transformers grouped_mm on small: RuntimeError: no such symbol"])
    assert experts_report(["small"], tokens=[8], libraries=["none"]).notes == []
    with pytest.raises(ConfigError, match="--libraries 'vllm': expected transformers grouped_mm, vllm triton"):
        experts_report(["small"], tokens=[8], libraries=["vllm"])


def test_what_would_compile_for_minutes_is_measured_by_name_only() -> None:
    h100 = Device("cuda", 90)
    plain = MoEConfig(128, 8, 2048, 768)
    experts = LIBRARIES.EXPERTS
    assert "only by name" in experts["flashinfer cutlass"].supports(plain, h100, named=False).reason
    assert "without biases" in experts["vllm triton"].supports(replace(plain, bias=True), h100, named=True).reason
    blocks = replace(plain, weight_format="fp8_block")
    assert "from sm90" in experts["vllm deep_gemm"].supports(blocks, Device("cuda", 80), named=True).reason


def test_the_router_benchs_table_and_json(monkeypatch, tmp_path, capsys):
    """Both routers are called with the same hidden states; times are made up."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "device", lambda *_: "cpu")
    monkeypatch.setattr(Ceilings, "measure", classmethod(lambda cls, _: cls(1e12, 1e15)))
    monkeypatch.setattr("eprt.bench.report.provenance", dict)
    monkeypatch.setattr(router, "HOST_CALLS", 1)
    monkeypatch.setattr(router, "CACHE_BYTES", 1)
    calls = []
    monkeypatch.setattr(router, "device_microseconds", lambda *given, **_: calls.append(given) or 7.0 * len(calls))
    path = tmp_path / "router.json"
    assert main(["bench", "router", "--tokens", "3", "--shapes", "gpt-oss-120b", "--output", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["router"], row["tokens"], row["us"]) for row in rows] == [("eprt", 3, 7.0), ("torch", 3, 14.0)]
    assert rows[0]["weights_us"] == pytest.approx(2 * 131 * 2880 / 1e6, abs=0.01)
    assert "gpt-oss-120b" in capsys.readouterr().out
    ours, theirs = (given[0]() for given in calls)
    assert torch.equal(ours.ids, theirs.ids)
