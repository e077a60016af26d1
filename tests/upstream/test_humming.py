"""What the humming executor takes from the installed humming: names, arguments, that its own checks accept every
schedule we ask for; and the executor itself in front of stand-ins for humming's operators. No GPU is needed."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.cases import expert_cases as cases
from support.stand_ins.humming import Launches, described_h200

from eprt.bench.baselines import baselines
from eprt.config import RuntimeConfig
from eprt.conformance.oracle import relative_error, shard_weights
from eprt.errors import UsageError
from eprt.experts import executor_spec, make_executor
from eprt.experts import humming as humming_module
from eprt.experts.humming.gemm import FP8_INPUT_SCHEMAS, WEIGHT_SCHEMAS, GemmShape, GroupedGemm, layer_config
from eprt.experts.humming.rows import RowKernel, activation_source
from eprt.experts.reference import ReferenceExecutor
from eprt.quant import encode

pytest.importorskip("triton", reason="triton isn't installed: humming imports it")
pytest.importorskip("cuda.bindings", reason="cuda-bindings isn't installed: humming imports it")


@pytest.fixture(scope="module")
def humming(tmp_path_factory):
    with described_h200(tmp_path_factory.mktemp("humming")) as installed:
        yield installed


@pytest.fixture
def launches(humming, monkeypatch):
    stand_in = Launches()
    stand_in.install(monkeypatch)
    return stand_in


def made_config(weight_format, shape, L, *, fp8=False, channel=False, bias=True):
    """humming's config of L experts, as `GroupedGemm` makes it."""
    one = layer_config(weight_format, shape, 0, bias=bias, fp8_inputs=fp8, channel_scale=channel)
    return dataclasses.replace(one, num_experts=L)


def build(config, gemm_type, schedule, *, batch_invariant=False):
    """humming's own checks of a kernel, short of compiling it. Raises what humming raises."""
    from humming.kernel.humming import HummingKernel

    compute = {"gemm_type": gemm_type, "use_batch_invariant": batch_invariant}
    values = json.loads(config.to_str()) | compute | json.loads(json.dumps(schedule))
    values.pop("num_sms", None)
    return HummingKernel(**values)


def matrices(H, I, parts):
    return GemmShape(parts, I, H, "cols"), GemmShape(1, H, I, "rows")


LAYERS = [
    (96, 24, 2),
    (96, 40, 2),
    (96, 96, 1),
    (128, 192, 1),
    (256, 192, 2),
    (2880, 1856, 2),
    (2880, 2880, 2),
    (4096, 2048, 2),
]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("weight_format", list(WEIGHT_SCHEMAS))
def test_every_choice_of_its_heuristics_is_legal(humming, weight_format, fp8):
    """Also for odd sizes, both token formats, and batch-invariant."""
    from humming.tune import get_heuristics_config

    if fp8 and weight_format not in FP8_INPUT_SCHEMAS:
        pytest.skip("no FP8 schedule on SM90: the executor keeps bf16 activations")
    for H, I, parts in LAYERS:
        for shape in matrices(H, I, parts):
            config = made_config(weight_format, shape, 8, fp8=fp8, channel=shape.parts == 2)
            for gemm_type in ("grouped_contiguous", "grouped_masked"):
                for invariant in (False, True):
                    for rows in (1, 64, 4096):
                        schedule = get_heuristics_config(
                            config, shape_m=rows, device=0, gemm_type=gemm_type, use_batch_invariant=invariant
                        )
                        build(config, gemm_type, schedule, batch_invariant=invariant)


@pytest.mark.parametrize(("H", "fp8"), [(100, False), (104, True)])
def test_hidden_sizes_of_no_whole_16_bytes_are_refused(humming, H, fp8):
    """Why `eprt.experts.rules.humming` asks for multiples of 16."""
    from humming.tune import get_heuristics_config

    for shape in matrices(H, 128, 2):
        config = made_config("fp8_block", shape, 8, fp8=fp8)
        schedule = get_heuristics_config(config, shape_m=64, device=0, gemm_type="grouped_contiguous")
        if shape.hidden_side == "cols" or not fp8:
            with pytest.raises(AssertionError):
                build(config, "grouped_contiguous", schedule)


def test_nvfp4_by_fp8_has_no_schedule(humming, monkeypatch):
    """Why low_precision_activations leaves NVFP4 alone."""
    from humming.tune import get_heuristics_config

    monkeypatch.setitem(FP8_INPUT_SCHEMAS, "nvfp4", FP8_INPUT_SCHEMAS["mxfp4"])
    config = made_config("nvfp4", GemmShape(1, 4096, 4096, "rows"), 8, fp8=True)

    def choose():
        schedule = get_heuristics_config(config, shape_m=64, device=0, gemm_type="grouped_contiguous")
        return build(config, "grouped_contiguous", schedule)

    with pytest.raises((AssertionError, ValueError)):
        choose()


def test_signatures(humming):
    """Every call in the words of the executor's modules."""
    from humming.kernel.humming import HummingKernel
    from humming.kernel.process_input import ProcessInputKernel
    from humming.transform import transform_humming_tensors
    from humming.tune import get_heuristics_config
    from humming.tune.process_input import get_process_input_tuning_intervals

    inspect.signature(transform_humming_tensors).bind("config", {}, True)
    inspect.signature(HummingKernel.prepare_kernels).bind("layer", "compute", "tuning", "device")
    inspect.signature(ProcessInputKernel.prepare_kernels).bind("problem", [], "device")
    inspect.signature(get_process_input_tuning_intervals).bind("problem", False)
    inspect.signature(get_heuristics_config).bind(
        "layer", shape_m=1, device=0, gemm_type="grouped_masked", use_batch_invariant=False
    )


def operator_arguments(source, name):
    """Argument names of an operator in the launcher's registration."""
    text = "".join(re.findall(r'"([^"]*)"', source.split(f'm.def(\n      "{name}(')[1].split(");")[0].join(['"', ""])))
    schema = text.split(") ->")[0]
    return [part.split("=")[0].split()[-1] for part in schema.split(",")]


def test_operators_take_our_positions(humming):
    """The two operators are called by position: the names behind the positions are these."""
    source = (Path(humming.__file__).parent / "csrc/launcher/launcher.cpp").read_text()
    assert operator_arguments(source, "launch_kernel.out") == [
        *("configs", "a", "b", "bs", "bs2", "as_", "as2", "bzp", "bias", "c", "sorted_ids", "expert_ids"),
        *("num_tokens_padded", "expert_layout", "locks", "top_k", "valid_shape_m", "should_check_tensor"),
    ]
    assert operator_arguments(source, "launch_process_input") == [
        *("configs", "inputs", "outputs", "group_scales", "token_scales", "expert_tokens", "scatter_idx"),
        "num_valid_tokens",
    ]


@pytest.mark.parametrize("name", list(cases.ACTIVATIONS))
def test_activations_are_accepted(humming, name):
    from humming import dtypes
    from humming.config import ActivationType, ProcessInputLayoutType, ProcessInputProblemConfig

    kind, source = activation_source(cases.ACTIVATIONS[name])
    problem = ProcessInputProblemConfig(
        input_dtype=dtypes.DataType.from_any("bfloat16"),
        hidden_size=128,
        quant_mode=made_config("mxfp4", GemmShape(1, 128, 128, "rows"), 2).input_quant_mode,
        activation_type=ActivationType(kind),
        activation_impl=source,
        layout=ProcessInputLayoutType("normal"),
    )
    assert problem.output_row_size == 128
    assert problem.input_row_size == 128 * cases.ACTIVATIONS[name].parts


def test_installed_version_is_new_enough(humming):
    assert executor_spec("humming").requirement.check()
    assert GroupedGemm.__doc__
    assert RowKernel.__doc__


def run_layer(config, tokens, runtime=cases.RUNTIME, warm=0):
    """(result, the reference's result) of the whole layer."""
    weights = cases.make_weights(config)
    runner = cases.built("humming", config, weights, runtime=runtime)
    if warm:
        runner.warmup(warm)
    return runner(tokens), cases.built("reference", config, weights)(tokens)


FORMATS = {"mxfp4": 96, "nvfp4": 48, "fp8_tensor": 24, "fp8_block": 40}


@pytest.mark.parametrize("activation", list(cases.ACTIVATIONS))
@pytest.mark.parametrize("weight_format", list(FORMATS))
def test_executor_in_front_of_the_stand_ins(launches, weight_format, activation):
    activation, I = cases.ACTIVATIONS[activation], FORMATS[weight_format]
    config = cases.make_config(weight_format, intermediate_size=I, activation=activation, bias=True)
    flat = cases.make_flat(config)
    out, expected = run_layer(config, replace(flat, every_row_read=True))
    assert relative_error(out, expected) < 1e-2
    assert not out[4::5].any()
    assert {kind for kind, *_ in launches.gemms} == {"grouped_contiguous"}
    slabs = cases.make_expert_major(flat, cases.shard_of(config))
    valid = cases.valid_rows(slabs)
    out, expected = run_layer(config, slabs)
    assert relative_error(out[valid], expected[valid]) < 1e-2
    assert launches.gemms[-1][0] == "grouped_masked"


@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_shares_add_up(launches, ep_size):
    config = cases.make_config("mxfp4", activation=cases.GPT_OSS, bias=True)
    weights, flat = cases.make_weights(config), replace(cases.make_flat(config), every_row_read=True)
    total = torch.zeros(flat.num_rows, 96)
    for rank in range(ep_size):
        total += cases.built("humming", config, weights, cases.shard_of(config, rank, ep_size))(flat)
    assert relative_error(total, cases.built("reference", config, weights)(flat)) < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_by_hand_is_the_same_job_around_the_same_launches(launches, rank, dtype):
    """Ids of other ranks and of nobody, weights and rows of NaN; what is left unwritten holds NaN too."""
    config = cases.make_config("mxfp4", num_experts=8, top_k=3, activation=cases.GPT_OSS, bias=True)
    shard = cases.shard_of(config, rank, 4)
    flat = replace(cases.make_flat(config, 40, dtype=dtype), every_row_read=True)
    runner = cases.built("humming", config, cases.make_weights(config), shard)
    expected = runner(flat)
    ours, launches.gemms = launches.gemms, []
    peer = baselines().direct_call(runner, flat)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives with NaN
    try:
        found = peer()
    finally:
        torch.use_deterministic_algorithms(False)
    assert launches.gemms == ours
    assert (found.dtype, found.shape) == (torch.bfloat16, expected.shape)
    baselines().check_direct(found, expected)
    assert not found[4::5].any()
    flat.ids.copy_(flat.ids.flip(0))  # a graph is replayed on other ids
    flat.weights.copy_(flat.weights.flip(0))
    flat.hidden.data.copy_(flat.hidden.data.flip(0))
    baselines().check_direct(peer(), expected.flip(0))


def test_down_bias_is_added_once(launches):
    config = cases.make_config("mxfp4", activation=cases.GPT_OSS, bias=True)
    flat = replace(cases.make_flat(config), every_row_read=True)
    for rank in (0, 1):
        shard = cases.shard_of(config, rank, 2, moe_tp_size=2)
        cut = shard_weights(cases.make_dense(config), config, shard)
        mxfp4 = replace(cut, gate_up=encode("mxfp4", cut.gate_up.data, 2), down=encode("mxfp4", cut.down.data, 1))
        out = make_executor("humming", config, shard, mxfp4, cases.CPU, cases.RUNTIME)(flat)
        expected = ReferenceExecutor(config, shard, mxfp4, cases.CPU, cases.RUNTIME)(flat)
        assert relative_error(out, expected) < 1e-2


@pytest.mark.parametrize("token_format", ["flat", "expert_major", None])
def test_warmup_compiles_what_the_dispatcher_emits(launches, monkeypatch, token_format):
    """A kernel for each power of two of rows, of each matrix; afterwards nothing compiles any more."""
    from humming.kernel.humming import HummingKernel

    compiled, prepare = [], HummingKernel.prepare_kernels

    def noted(layer, compute, tuning, device):
        compiled.append((json.loads(compute)["gemm_type"], [low for low, *_ in json.loads(tuning)]))
        return prepare(layer, compute, tuning, device)

    monkeypatch.setattr(HummingKernel, "prepare_kernels", noted)
    config = cases.make_config("mxfp4", hidden_size=128, intermediate_size=128)
    runtime = RuntimeConfig(token_format=token_format)
    flat = replace(cases.make_flat(config, 6), every_row_read=True)
    tokens = cases.make_expert_major(flat, cases.shard_of(config)) if token_format == "expert_major" else flat
    out, expected = run_layer(config, tokens, runtime, warm=6)
    valid = cases.valid_rows(tokens) if token_format == "expert_major" else slice(None)
    assert relative_error(out[valid], expected[valid]) < 1e-2
    kinds = {"flat": ["grouped_contiguous"], "expert_major": ["grouped_masked"]}
    wanted = kinds.get(token_format, ["grouped_contiguous", "grouped_masked"])
    assert {kind for kind, *_ in launches.gemms} == set(wanted)
    assert sorted(compiled) == [(kind, [0, 1, 2, 4, 8]) for kind in wanted for _ in range(2)]


def test_a_call_behind_a_warm_world_compiles_nothing_or_is_refused(launches):
    warm = []

    def require_cold(what: str) -> None:
        if warm:
            raise UsageError(what)

    config = cases.make_config("mxfp4", hidden_size=128, intermediate_size=128)
    flat, shard = replace(cases.make_flat(config, 6), every_row_read=True), cases.shard_of(config)
    given = config, shard, cases.make_weights(config), cases.CPU, RuntimeConfig(token_format="flat")
    ready, late = (make_executor("humming", *given, require_cold=require_cold) for _ in range(2))
    ready.warmup(6)
    warm.append(True)
    assert ready(flat).isfinite().all()
    with pytest.raises(UsageError, match="compiling humming's"):
        late(flat)


@pytest.mark.parametrize("low_precision", [False, True])
def test_warmup_has_the_top_k_that_calls_will_have(launches, monkeypatch, low_precision):
    """A dispatcher may pad top-k: the kernel that scatters rows is made for one K."""
    made, widths, rows_kernel = [], [], humming_module.RowKernel

    class Noted(rows_kernel):
        def __init__(self, *args):
            made.append(args[-1])
            super().__init__(*args)

        def __call__(self, rows, num_rows_out, **layout):
            if layout.get("scatter_idx") is not None:
                widths.append((self._problem.scatter_width, layout["scatter_idx"].shape[1]))
                problem = self._problem
                return torch.zeros(num_rows_out, problem.output_row_size), None
            return super().__call__(rows, num_rows_out, **layout)

    monkeypatch.setattr(humming_module, "RowKernel", Noted)
    monkeypatch.setattr(humming_module.GroupedGemm, "warmup", lambda *_: None)
    config = cases.make_config("mxfp4", hidden_size=128, intermediate_size=128)
    runtime = RuntimeConfig(token_format="flat", low_precision_activations=low_precision)
    runner = cases.built("humming", config, cases.make_weights(config), runtime=runtime)
    monkeypatch.setattr(runner, "_experts", lambda rows, *_: None)
    runner.warmup(6, top_k=3)
    after = len(made)
    flat = cases.make_flat(config, 6)
    wide = replace(
        flat,
        ids=torch.nn.functional.pad(flat.ids, (0, 1), value=config.num_experts),
        weights=torch.nn.functional.pad(flat.weights, (0, 1)),
    )
    runner(wide)
    assert len(made) == after, "made after warm-up"
    assert set(widths) == ({(3, 3)} if low_precision else set())


def test_streams_have_their_own_locks(launches):
    config = cases.make_config("mxfp4")
    runner, flat = cases.built("humming", config, cases.make_weights(config)), cases.make_flat(config)
    found = []
    for launches.stream in (7, 8, 7):
        runner(flat)
        found.append([gemm._stream_locks().data_ptr() for gemm in (runner._gate_up, runner._down)])
    assert found[0] == found[2]
    assert len({pointer for pointers in found[:2] for pointer in pointers}) == 4
