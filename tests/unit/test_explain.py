"""`eprt explain`: the same plan as a layer's, names without files, other layouts, the plot's curves."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.cases import expert_cases as cases

from eprt.cli import main
from eprt.cli.arguments import Explain
from eprt.cli.explain import as_json, curves, kinds_of_layers
from eprt.cli.parsing import parse
from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.errors import ConfigError, UnsupportedError
from eprt.layer import ExpertParallelMoE
from eprt.models.published import MODELS, model_config
from eprt.plan import make_plan
from eprt.plan.layouts import layouts
from eprt.support import Device
from eprt.world import World

RUNTIMES = st.builds(
    RuntimeConfig,
    dispatcher=st.sampled_from(["auto", "none", "torch"]),
    executor=st.sampled_from(["auto", "reference", "torch_grouped"]),
    max_tokens_per_rank=st.integers(1, 1 << 16),
    strict_capacity=st.booleans(),
    payload=st.sampled_from([None, "f32", "bf16"]),
    token_format=st.sampled_from([None, "flat", "expert_major"]),
    phase=st.sampled_from(["decode", "prefill"]),
    deterministic=st.booleans(),
)


def explained(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["explain", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def flags(runtime: RuntimeConfig) -> list[str]:
    words: list[str] = []
    for name, value in asdict(runtime).items():
        flag = "--" + name.replace("_", "-")
        words += [flag] * value if isinstance(value, bool) else [flag, str(value)]
    return words


@given(runtime=RUNTIMES)
@settings(max_examples=30, deadline=None)
def test_flags_say_every_option_of_a_layer_and_leave_it_its_defaults(runtime: RuntimeConfig) -> None:
    assert parse(["explain", "--model", "x"]).runtime == RuntimeConfig()  # type: ignore[union-attr]
    assert parse(["explain", "--model", "x", *flags(runtime)]).runtime == runtime  # type: ignore[union-attr]


@given(runtime=RUNTIMES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_layer_is_built_with_the_plan_that_is_explained(runtime: RuntimeConfig) -> None:
    config = cases.make_config("f32")
    arguments = Explain(model=None, world=1, runtime=runtime)  # type: ignore[arg-type]
    with World.from_env("cpu") as world:
        plan, refused = None, ""
        try:
            plan = make_plan(config, arguments.parallel, arguments.runtime, Device.parse(arguments.device))
        except UnsupportedError as error:
            refused = str(error)
        if plan is None:
            with pytest.raises(UnsupportedError) as caught:
                ExpertParallelMoE(config, world, cases.make_weights(config), runtime=runtime)
            assert str(caught.value) == refused
            return
        layer = ExpertParallelMoE(config, world, cases.make_weights(config), runtime=runtime)
        assert as_json(layer.plan) == as_json(plan)
        assert layer.dispatcher.capacity.max_tokens_per_rank == plan.max_tokens_per_rank


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("Kimi-K2-Thinking", "int4"),
        ("Qwen3-30B-A3B-GPTQ-Int4", "int4"),
        ("Qwen3-30B-A3B-AWQ", "int4"),
        ("GLM-4.5-Air-FP8", "fp8_channel"),
        ("Qwen3-30B-A3B-NVFP4", "nvfp4"),
        ("Qwen3-30B-A3B-quantized.w4a16", "int4"),
        ("Llama-4-Scout-17B-16E-Instruct-FP8-dynamic", "fp8_channel"),
    ],
)
def test_published_configs_of_each_packer(capsys: pytest.CaptureFixture[str], name: str, weights: str) -> None:
    """Their experts alone decide: routers, attention and shared experts that are left out are other modules."""
    ((config, layers),) = kinds_of_layers(model_config(name))
    assert config.weight_format == weights
    assert len(layers) == {"K": 60, "Q": 48, "G": 45, "L": 48}[name[0]]
    assert explained(capsys, "--model", name, "--world", "8", "--device", "sm90")["plans"][0]["executor"]


@pytest.mark.parametrize("name", MODELS)
def test_every_name_answers_without_a_file(name: str) -> None:
    kinds = kinds_of_layers(model_config(name.upper()))
    for config, layers in kinds:
        assert layers
        plan = make_plan(config, ParallelConfig(4), RuntimeConfig(), Device.parse("sm90"))
        assert plan.chosen.us is not None


def test_published_sizes_add_up_to_the_models_names() -> None:
    """Routed experts' parameters, in thousand millions, of models whose names or cards say how large they are."""

    def billions(name: str) -> float:
        kinds = kinds_of_layers(model_config(name))
        return sum(
            len(layers) * c.num_experts * (c.activation.parts + 1) * c.intermediate_size * c.hidden_size
            for c, layers in kinds
        ) / 1e9  # fmt: skip

    said = {
        "gpt-oss-120b": 117, "gpt-oss-20b": 21, "Qwen3-30B-A3B": 30.5, "Qwen3-235B-A22B": 235,
        "Qwen3-Coder-480B-A35B-Instruct": 480, "Qwen3-Next-80B-A3B-Instruct": 80, "DeepSeek-V3": 671,
        "DeepSeek-V2-Lite": 15.7, "Kimi-K2-Instruct": 1000, "GLM-4.5": 355, "GLM-4.5-Air": 106, "MiniMax-M2": 230,
        "Mixtral-8x7B-Instruct-v0.1": 46.7, "Mixtral-8x22B-Instruct-v0.1": 141, "Phi-3.5-MoE-instruct": 42,
        "OLMoE-1B-7B-0125": 6.9, "granite-3.1-3b-a800m-instruct": 3.3, "Llama-4-Scout-17B-16E": 109,
        "Llama-4-Maverick-17B-128E": 400, "Qwen3.5-397B-A17B": 397,
    }  # fmt: skip
    shares = {name: billions(name) / total for name, total in said.items()}
    assert not {name: share for name, share in shares.items() if not 0.85 <= share <= 1.03}


def test_a_name_that_nobody_knows_is_refused_with_those_known() -> None:
    with pytest.raises(ConfigError, match=r"--model gpt-oss-12b: there is no such file .*gpt-oss-120b, gpt-oss-20b"):
        model_config("gpt-oss-12b")
    with pytest.raises(ConfigError, match=r"no such file"):
        model_config("a" * 5000)


def test_gpus_are_not_put_on_one_host_silently(capsys: pytest.CaptureFixture[str]) -> None:
    found = explained(capsys, "--model", "deepseek-v3", "--world", "64", "--device", "sm90")
    assert found["parallel"]["ranks_per_host"] == 8
    assert found["plans"][0]["dispatcher"] == "deepep"
    assert main(["explain", "--model", "deepseek-v3", "--world", "64", "--device", "sm90"]) == 0
    text = capsys.readouterr().out
    assert "world of 64 x sm90, 8 ranks per host (--ranks-per-host)" in text
    assert "sm90 stands for H200 SXM" in text
    assert "modelled, not measured" in text
    assert main(["explain", "--model", "deepseek-v3", "--world", "1", "--device", "sm90"]) == 0
    assert "world of 1 x sm90, 1 rank per host" in capsys.readouterr().out


def ways(kinds, world: int, phase="decode"):
    runtime = RuntimeConfig(phase=phase, max_tokens_per_rank=4096)
    return layouts(kinds, ParallelConfig(world, ranks_per_host=8), runtime, Device.parse("sm90"))


def test_layouts_of_64_gpus() -> None:
    [(config, layers)] = kinds_of_layers(model_config("deepseek-v3"))
    found = {way.name: way for way in ways([(config, len(layers))], 64)}
    assert len(found) == 5
    one, hosts, all_of_them = (
        found[name] for name in ("one rank, 64 replicas", "EP 8 within a host, 8 replicas", "EP 64")
    )
    # 58 layers of 256 experts of 3 * 2048 * 7168 FP8 weights: counted apart from the plan's own table of bytes.
    assert one.weight_gb == pytest.approx(58 * 256 * 3 * 2048 * 7168 * (1 + 4 / 128**2) / 1e9)
    assert one.fits is False
    assert hosts.weight_gb == pytest.approx(one.weight_gb / 8)
    assert all_of_them.weight_gb == pytest.approx(one.weight_gb / 64)
    assert all_of_them.bound.startswith("RDMA")
    assert hosts.fits
    for way in (hosts, all_of_them):
        assert way.tokens_per_s == pytest.approx(64 * 128 / (58 * way.layer_us * 1e-6))  # type: ignore[operator]


def test_replicas_can_beat_expert_parallelism() -> None:
    small = MoEConfig(32, 8, 1024, 256)
    best = ways([(small, 24)], 16, phase="prefill")[0]
    assert best.parallel.world_size == 1
    assert best.fits


def test_what_does_not_fit_is_never_first() -> None:
    for name in ("Kimi-K2-Instruct", "DeepSeek-V3", "Mixtral-8x22B-Instruct-v0.1"):
        kinds = [(config, len(layers)) for config, layers in kinds_of_layers(model_config(name))]
        assert ways(kinds, 64)[0].fits, name


@pytest.mark.parametrize(
    ("moe_tp", "says"), [(1, ""), (2, "EP 8 is the fastest that fits: 1."), (8, "times the tokens")]
)
def test_a_faster_layout_is_named_whatever_the_attention(moe_tp: int, says: str, capsys) -> None:
    for attention_tp in ("1", "2"):
        words = ["--world", "8", "--device", "sm90", "--attention-tp", attention_tp, "--moe-tp", str(moe_tp)]
        assert main(["explain", "--model", "Qwen3-30B-A3B", *words]) == 0
        found = capsys.readouterr().out
        assert says in found
        assert ("is the fastest" in found) == bool(says)


@pytest.mark.parametrize(
    ("hidden", "world", "moe_tp", "says"),
    [
        (256, 4, 4, "[0, 64) of 256 cuts a scale block of 128; choose a moe_tp_size that keeps blocks whole"),
        (320, 2, 1, "320 rows or columns, by the config, are no multiple of its blocks of 128"),
        (256, 4, 2, ""),
    ],
)
def test_what_the_files_could_not_be_cut_into_is_refused(
    tmp_path: Path, hidden: int, world: int, moe_tp: int, says: str, capsys
) -> None:
    """As `load_layer` would refuse it."""
    quant = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    sizes = {"hidden_size": hidden, "moe_intermediate_size": 256}
    hf = MODELS["Qwen3-30B-A3B"] | sizes | {"quantization_config": quant}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    words = ["--world", str(world), "--ranks-per-host", "1" if says else "4", "--device", "sm90"]
    refused = main(["explain", "--model", str(tmp_path), *words, "--moe-tp", str(moe_tp)])
    told = capsys.readouterr()
    assert refused == (2 if says else 0)
    assert f"eprt: ConfigError: {tmp_path}/config.json: {says}" in told.err if says else not told.err
    if not says:  # a layout that was not asked for
        row = next(line for line in told.out.splitlines() if line.startswith("EP 1 x MoE-TP 4"))
        assert "[0, 64) of 256 cuts a scale block of 128" in row
        gpt_oss = ["explain", "--model", "gpt-oss-120b", "--world", "4", "--moe-tp", "4", "--device", "sm90"]
        assert main(gpt_oss) == 0  # 720 of 2880: loaders of vLLM and SGLang pad it


def test_no_pair_is_drawn_below_the_floor() -> None:
    config = kinds_of_layers(model_config("gpt-oss-120b"))[0][0]
    for parallel in (ParallelConfig(4), ParallelConfig(32, ranks_per_host=8)):
        lines = curves(config, parallel, RuntimeConfig(), Device.parse("sm90"))
        floor = lines.pop("roofline")
        assert len(lines) >= 3
        for name, points in lines.items():
            assert all(us > floor[tokens] for tokens, us in points.items()), name


def test_the_plot_is_a_picture(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.svg"
    assert main(["explain", "--model", "gpt-oss-20b", "--device", "sm90", "--plot", str(path)]) == 0
    assert "<svg" in path.read_text()
    assert main(["explain", "--model", "gpt-oss-20b", "--device", "cpu", "--plot", str(path)]) == 2
    assert "no time is known on cpu" in capsys.readouterr().err


def test_ranks_per_host_follow_the_device_and_the_world() -> None:
    assert replace(Explain(model=None), world=3, device="sm90").parallel.ranks_per_host == 3  # type: ignore[arg-type]
    words = ["--world", "8", "--device", "sm90", "--ranks-per-host", "4"]
    assert parse(["explain", "--model", "x", *words]).parallel.ranks_per_host == 4
    says = r"--ranks-per-host 8 \(the default\) of --world 12: .* use one of 1, 2, 3, 4, 6, 12"
    with pytest.raises(ConfigError, match=says):
        assert Explain(model=Path(), world=12, device="sm90").parallel


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"ranks_per_host": 7}, "--ranks-per-host 7 of --world 16: eprt plans for every host full"),
        ({"hosts": 3}, "--hosts 3 of --world 16: eprt plans for the same number of ranks on every host"),
        ({"hosts": 0}, "--hosts 0 of --world 16"),
    ],
)
def test_hosts_that_ranks_do_not_fill_explain_themselves(sizes: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError) as failure:
        assert Explain(model=Path(), world=16, **sizes).parallel  # type: ignore[arg-type]
    assert str(failure.value).startswith(says)
    assert "use one of 1, 2, 4, 8, 16" in str(failure.value)


def test_hosts_are_as_many_as_asked_for() -> None:
    assert Explain(model=Path(), world=16, hosts=4, device="sm90").parallel.ranks_per_host == 4
    assert Explain(model=Path(), world=16, ranks_per_host=32, device="sm90").parallel.ranks_per_host == 16
    with pytest.raises(ConfigError, match="--hosts 2 and --ranks-per-host 8: give one of them"):
        assert Explain(model=Path(), world=16, hosts=2, ranks_per_host=8).parallel
    with pytest.raises(ConfigError, match="world_size 1000000000001: expected at most 65536"):  # at once
        assert Explain(model=Path(), world=10**12 + 1, hosts=3).parallel
