"""The plugin inside SGLang on CPU (scripts/test_sglang.sh): tokens of one and two ranks equal SGLang's own and
transformers'."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_models import (
    PROMPTS,
    Prompts,
    adapted,
    by_transformers,
    experts_by_transformers,
    glm4_model,
    glm4v_model,
    minimax_model,
    packed_model,
    qwen2_model,
    qwen3_5_model,
    qwen3_model,
    qwen3_next_model,
    qwen3_vl_model,
    retrained,
)
from support.ports import free_port
from support.processes import run_in_session

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="runs under scripts/test_sglang.sh")

LIMIT_S = 420
ONE: dict[str, Any] = {}
CUT: dict[str, Any] = {"tp_size": 2}  # each expert in two; SGLang sums what the parts say
SUMMED = {"tp_size": 2, "ep_size": 2}  # SGLang sums what the ranks' experts say
CARRIED = SUMMED | {"dp_size": 2, "enable_dp_attention": True, "enable_dp_lm_head": True}
TEXT = {"enable_multimodal": False}  # images are made ready by files that the tiny models haven't got
WHERE = ("over 2 ranks", "on this rank alone")
RANKS = pytest.mark.parametrize("engine", [ONE, CARRIED], ids=["one", "two"])
CHANGES = "sglang_run.changed"  # a loader of weights there
LINE = "3 of 3 MoE layers (model.layers.0.mlp.experts to model.layers.2.mlp.experts)"


def run(
    folder: Path,
    model: Path,
    plugins: str,
    engine: dict[str, Any],
    dtype: str,
    kill: int | None = None,
    prompts: Prompts = PROMPTS,
    updates: Sequence[tuple[str, str]] = (),
    **more: str,
) -> tuple[int, str, list[Any]]:
    """Exit code, log and tokens of one engine; with updates, tokens before and after each."""
    spec = {"model": str(model), "dtype": dtype, "prompts": prompts, "out": str(folder / "tokens"), "kill": kill}
    (folder / "spec.json").write_text(json.dumps(spec | {"engine": engine, "updates": updates, "port": free_port()}))
    ranks = engine.get("tp_size", 1)
    environment = os.environ | {"SGLANG_PLUGINS": plugins, "SGLANG_USE_CPU_ENGINE": "1"} | more
    environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(ranks))
    command = [sys.executable, str(Path(__file__).with_name("sglang_run.py")), str(folder / "spec.json")]
    code = run_in_session(command, folder / "log", environment, LIMIT_S)
    tokens = json.loads((folder / "tokens").read_text()) if (folder / "tokens").exists() else []
    return code, (folder / "log").read_text(errors="replace"), tokens


def answered(
    folder: Path,
    model: Path,
    engine: dict[str, Any],
    dtype: str,
    want: list[list[int]],
    plugins: str = "cpu,eprt",
    **more: Any,
) -> str:
    """The log of an engine that gave the wanted tokens."""
    code, log, tokens = run(folder, model, plugins, engine, dtype, **more)
    assert (code, tokens) == (0, want), log[-3000:]
    return log


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """The checkpoint, and the tokens that transformers adds to each prompt."""
    folder = tmp_path_factory.mktemp("qwen3")
    want, lead = by_transformers(qwen3_model(folder))
    assert lead > 1e-4  # float32 on both sides, sums in another order
    assert len({tuple(each[:5]) for each in want}) == len(PROMPTS)  # the model isn't stuck on one token
    return folder, want


@pytest.mark.parametrize(
    ("engine", "ranks"),
    [(ONE, "on this rank alone"), (CUT, "on one of 2 "), (SUMMED, "on one of 2 ")],
    ids=["one", "two-parts-summed-by-sglang", "two-summed-by-sglang"],
)
def test_tokens_are_sglangs_own(
    engine: dict[str, Any], ranks: str, qwen3: tuple[Path, list[list[int]]], tmp_path: Path
) -> None:
    model, want = qwen3
    log = answered(tmp_path, model, engine, "float32", want)
    assert f"{LINE} {ranks}" in log
    assert log.count("eprt: ready") == 1


def test_tokens_travel_to_an_idle_rank_and_back_and_a_killed_rank_is_named(
    qwen3: tuple[Path, list[list[int]]], tmp_path: Path
) -> None:
    """Prompts go to the ranks in turn: the rank whose are short is idle for the many steps of the other's. Each answer
    says what experts were chosen, as a trainer that replays the choice asks."""
    model, want = qwen3
    engine = CARRIED | {"enable_return_routed_experts": True}
    _, log, tokens = run(tmp_path, model, "cpu,eprt", engine, "float32", kill=1)
    assert tokens == want, log[-3000:]
    chosen = json.loads((tmp_path / "tokens.experts").read_text())
    assert [[tuple(row) for row in rows] for rows in chosen] == experts_by_transformers(model, want)
    assert f"{LINE} over 2 ranks: " in log
    assert log.count("eprt: ready") == 1
    victim = re.search(r"killed (\d+)", log)
    assert victim, log[-3000:]
    assert re.search(rf"eprt: rank 1 exited: process {victim[1]} is gone; .* missed by rank 0", log), log[-4000:]


def test_stages_of_a_pipeline_have_their_own_layers(qwen3: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    """Each stage brings the new weights of its layers in."""
    model, want = qwen3
    [(trained, then)] = retrained(model, [tmp_path / "trained"])
    updates = [("disk", str(trained))]
    code, log, tokens = run(tmp_path, model, "cpu,eprt", {"pp_size": 2}, "float32", updates=updates)
    assert (code, tokens) == (0, [want, then]), log[-3000:]
    for stage, layers in ((0, "1 of 1"), (1, "2 of 2")):
        assert re.search(rf"PP{stage}\] eprt: {layers} MoE layers .* on this rank alone", log), log[-3000:]


def test_adapters_of_attention_beside_the_experts(qwen3: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    model, want = qwen3
    tuned = adapted(model, tmp_path / "adapter")
    assert tuned != want
    lora = {"enable_lora": True, "lora_target_modules": ["q_proj", "v_proj"], "lora_backend": "torch_native"}
    log = answered(tmp_path, model, ONE | lora | {"lora_paths": {"tuned": str(tmp_path / "adapter")}}, "float32", want)
    assert json.loads((tmp_path / "tokens.adapted").read_text()) == [tuned]
    assert f"{LINE} on this rank alone" in log


@RANKS
def test_new_weights_in_every_way_that_trainers_have(
    engine: dict[str, Any], qwen3: tuple[Path, list[list[int]]], tmp_path: Path
) -> None:
    """Updates in a row of an engine that runs; after each, the tokens of a model made from that checkpoint."""
    model, before = qwen3
    trained = retrained(model, [tmp_path / str(turn) for turn in range(5)])
    turns = {"disk": 0, "asleep": 1, "tensors": 2, "refused": 2, "broadcast": 3, "bucket": 4, "disk again": 0}
    updates = [(way.split()[0], str(trained[turn][0])) for way, turn in turns.items()]
    wanted = [before, *(trained[turn][1] for turn in turns.values())]
    saving = engine | {"enable_memory_saver": True, "custom_weight_loader": [CHANGES]}
    code, log, tokens = run(tmp_path, model, "cpu,eprt", saving, "float32", updates=updates)
    assert (code, tokens) == (0, wanted), log[-3000:]
    assert f"{LINE} {WHERE[engine is ONE]}" in log
    waits = "eprt: old weights serve until the rest of the new ones comes: model.layers.0.mlp.experts: of 1 experts"
    assert waits in log
    for way in ("direct", CHANGES):
        assert f"refused: False eprt holds the experts, and load_format '{way}' would write into parameters" in log


@pytest.mark.parametrize(
    ("engine", "rows", "seed"),
    [(ONE, 256, 59), (CARRIED, 256, 59), (CUT, 96, 19)],
    ids=["one", "two", "cut-in-a-scale"],
)
def test_mxfp4_tokens_are_those_of_transformers(engine: dict[str, Any], rows: int, seed: int, tmp_path: Path) -> None:
    """SGLang itself has no MXFP4 experts on CPU; transformers decodes them, in float32. Its CPU attention has no sinks:
    the checkpoint's take no weight. Of 96 rows one rank has 64 and the other 32, and zeros."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    from eprt.conformance.tiny_model import write_tiny_checkpoint

    folder = write_tiny_checkpoint(tmp_path / "gpt-oss", num_layers=2, intermediate_size=rows, seed=seed)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        sinks = {name: torch.full_like(tensor, -1e4) for name, tensor in tensors.items() if name.endswith("sinks")}
        save_file(tensors | sinks, file, metadata={"format": "pt"})
    want, lead = by_transformers(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float())
    assert lead > 0.025  # bf16's own differences from float32 reach 0.02 of these logits' deviation
    log = answered(tmp_path, folder, engine, "bfloat16", want)
    assert "mxfp4, 8 experts, top-4" in log


@RANKS
def test_fp8_block_tokens_are_those_of_transformers(engine: dict[str, Any], tmp_path: Path) -> None:
    """transformers has the same numbers decoded, in float32."""
    want, lead = by_transformers(packed_model(tmp_path / "fp8", "fp8_block", seed=432))
    assert lead > 0.04  # bf16's own differences from float32 reach 0.035 of these logits' deviation
    log = answered(tmp_path, tmp_path / "fp8", engine, "bfloat16", want)
    assert "fp8_block, 8 experts, top-2" in log


@pytest.mark.parametrize(
    ("dialect", "format", "seed", "engine"),
    [
        ("online", "fp8_tensor", 16, ONE | {"quantization": "fp8"}),
        ("pack_quantized", "int4", 152, CARRIED),
        ("float_channel", "fp8_channel", 108, SUMMED),
        ("modelopt_fp8", "fp8_tensor", 55, CARRIED),
    ],
    ids=["online-fp8-one", "pack-quantized-two", "float-channel-two-summed-by-sglang", "modelopt-fp8-two"],
)
def test_packed_tokens_are_those_of_transformers(
    dialect: str, format: str, seed: int, engine: dict[str, Any], tmp_path: Path
) -> None:
    """SGLang loads the file's own tensors, in bfloat16 alone, and an update brings them again. transformers has the
    same numbers decoded, in float32. Of plain ones eprt makes FP8."""
    prompts = [PROMPTS[0], PROMPTS[3]]
    want, lead = by_transformers(packed_model(tmp_path / "model", dialect, seed), prompts)
    assert lead > 0.04  # bf16's own differences from float32 reach 0.035 of these logits' deviation
    updates = [("disk", str(tmp_path / "model"))]
    log = answered(tmp_path, tmp_path / "model", engine, "bfloat16", [want] * 2, prompts=prompts, updates=updates)
    assert f"{format}, {4 if engine is SUMMED else 8} experts, top-2" in log


@RANKS
def test_a_router_with_a_bias_and_shared_experts(engine: dict[str, Any], tmp_path: Path) -> None:
    """GLM-4.5 chooses as DeepSeek-V3 does: groups of experts, by a bias; a factor scales what the routed ones say."""
    want, lead = by_transformers(glm4_model(tmp_path / "glm4"))
    assert lead > 1e-4  # float32 on both sides, sums in another order
    dense = {} if engine is ONE else {"moe_dense_tp_size": 1}  # gathered otherwise, by a Triton kernel
    log = answered(tmp_path, tmp_path / "glm4", engine | dense, "float32", want)
    assert f"2 of 2 MoE layers (model.layers.1.mlp.experts to model.layers.2.mlp.experts) {WHERE[engine is ONE]}" in log


@pytest.mark.parametrize(
    ("make", "block", "engine"),
    [
        (qwen2_model, "mlp", CARRIED),
        (qwen3_next_model, "mlp", CARRIED),
        (qwen3_5_model, "mlp", CARRIED | TEXT),
        (qwen3_vl_model, "mlp", CARRIED | TEXT),
        (glm4v_model, "mlp", CARRIED | TEXT),
        (minimax_model, "block_sparse_moe", CARRIED | {"enable_dp_lm_head": False}),  # its head is cut in any case
    ],
    ids=["qwen2-moe", "qwen3-next", "qwen3.5-moe", "qwen3-vl-moe", "glm-4.5v", "minimax-m2"],
)
def test_blocks_of_other_models(
    make: Callable[[Path], Any], block: str, engine: dict[str, Any], tmp_path: Path
) -> None:
    """A shared expert behind a gate, and a bias beside the gate; an idle rank's blocks, too, where eprt carries the
    tokens."""
    want, lead = by_transformers(make(tmp_path / "model"))
    assert lead > 1e-4  # float32 on both sides, sums in another order
    assert len({tuple(each[:5]) for each in want}) == len(PROMPTS)  # the model isn't stuck on one token
    log = answered(tmp_path, tmp_path / "model", engine, "float32", want)
    assert re.search(rf"2 of 2 MoE layers \(\S+\.0\.{block}\.experts to \S+\.1\.{block}\.experts\) over 2 ranks", log)


PACKED = "packed = sglang_packed:register"  # experts in a format of its own
LACKS = "PackedMoEMethod"


@pytest.mark.parametrize(
    ("package", "version", "plugin", "reason"),
    [("sglang", "9.9", "", "SGLang 9.9: the plugin hooks into SGLang"), ("packed", "0", PACKED, LACKS)],
    ids=["version", "quantisation"],
)
def test_what_eprt_cannot_run_is_left_to_sglang(
    package: str, version: str, plugin: str, reason: str, qwen3: tuple[Path, list[list[int]]], tmp_path: Path
) -> None:
    """The tokens are those of SGLang's own experts then, and one line says why."""
    model, want = qwen3
    path = told(tmp_path, package, version, plugin)
    log = answered(tmp_path, model, ONE, "float32", want, "cpu,packed,eprt", PYTHONPATH=path)
    why = [line for line in log.splitlines() if "layers like it fall back to SGLang: " in line]
    assert len(why) == 1
    assert reason in why[0]
    assert "on this rank alone" not in log


def test_a_flag_that_leaves_the_layers_to_sglang(qwen3: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    """One of the few such flags with which SGLang itself answers on a CPU."""
    model, want = qwen3
    log = answered(tmp_path, model, ONE | {"enable_single_batch_overlap": True}, "float32", want)
    assert "3 of 3 MoE layers fall back to SGLang: --enable-single-batch-overlap splits a layer's call" in log
    assert "on this rank alone" not in log


def test_a_layer_that_would_fall_back_is_an_error_if_strict(
    qwen3: tuple[Path, list[list[int]]], tmp_path: Path
) -> None:
    path = told(tmp_path, "packed", "0", PACKED)
    strict = '{"strict": true}'
    code, log, tokens = run(tmp_path, qwen3[0], "cpu,packed,eprt", ONE, "float32", EPRT_SGLANG=strict, PYTHONPATH=path)
    assert code != 0, log[-3000:]
    assert not tokens
    assert re.search(f"eprt.strict is set: .*{LACKS}", log)


def told(folder: Path, package: str, version: str, plugin: str) -> str:
    """Writes what `importlib.metadata` reads of a package. Returns a PYTHONPATH with it in front."""
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{plugin}\n")
    return os.pathsep.join([str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
