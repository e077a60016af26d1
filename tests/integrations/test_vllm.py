"""The plugin inside vLLM on CPU (scripts/test_vllm.sh): tokens of DP and TP ranks equal those of one process."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_models import (
    PROMPTS,
    Prompts,
    by_transformers,
    experts_by_transformers,
    gemma4_model,
    glm4_model,
    llama4_model,
    qwen2_model,
    qwen3_model,
    retrained,
)
from support.ports import free_port

from eprt.integrations.vllm.supported import DECODE, RUNNERS, SUMMING

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="runs under scripts/test_vllm.sh")

LIMIT_S = 420


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    qwen3_model(folder)
    return folder


@pytest.fixture(scope="session")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from eprt.conformance.tiny_model import write_tiny_checkpoint

    return write_tiny_checkpoint(tmp_path_factory.mktemp("gpt-oss"), num_layers=2, seed=7)


def ranks_run(
    folder: Path,
    model: Path,
    dtype: str,
    dp: int,
    tp: int,
    plugin: str,
    prompts: list[list[Any]],
    ep: bool = True,
    updates: list[tuple[str, Path | str]] | None = None,
    as_gpu: bool = False,
    gates: bool = False,
    **llm: Any,
) -> tuple[list[int], list[str], list[list[list[int]]]]:
    """Exit codes, logs and tokens of `dp` programs, one for each list of prompts."""
    port = free_port()
    outs = [folder / f"{plugin}-{dp}-{tp}-{rank}.tokens" for rank in range(dp)]
    programs: list[subprocess.Popen[bytes]] = []
    for rank, out in enumerate(outs):
        spec = {"model": str(model), "dtype": dtype, "dp": dp, "tp": tp, "ep": ep}
        spec |= {"rank": rank, "port": port, "llm": llm, "as_gpu": as_gpu, "gates": gates}
        spec |= {"prompts": prompts[rank], "out": str(out), "all_out": [str(path) for path in outs]}
        if updates is not None:
            spec["updates"] = [(way, str(checkpoint)) for way, checkpoint in updates]
        path = out.with_suffix(".json")
        path.write_text(json.dumps(spec))
        beside = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])  # vllm_trainer
        environment = os.environ | {"VLLM_PLUGINS": plugin, "PYTHONPATH": beside}
        with out.with_suffix(".log").open("wb") as log:
            command = [sys.executable, str(Path(__file__).with_name("vllm_rank.py")), str(path)]
            programs.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True))
    codes = [wait(program) for program in programs]
    logs = [out.with_suffix(".log").read_text(errors="replace") for out in outs]
    return codes, logs, [json.loads(out.read_text()) if out.exists() else [] for out in outs]


def wait(program: subprocess.Popen[bytes], limit_s: float = LIMIT_S) -> int:
    try:
        return program.wait(limit_s)
    except subprocess.TimeoutExpired:
        end(program)
        return program.wait(10)


def end(program: subprocess.Popen[bytes]) -> None:
    """It and what it started."""
    try:
        os.killpg(program.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def serve(
    folder: Path,
    model: Path,
    dtype: str,
    dp: int = 1,
    tp: int = 1,
    ep: bool | None = None,
    prompts: Prompts = PROMPTS,
    first: int = 1,
    **llm: Any,
) -> tuple[list[list[int]], str]:
    """The tokens of vLLM's ranks under eprt, and the first rank's log. Of two DP ranks that rank gets the `first`
    prompts; experts are parallel there, unless `ep` says otherwise."""
    parts = [prompts[:first], prompts[first:]] if dp == 2 else [prompts]
    codes, logs, tokens = ranks_run(folder, model, dtype, dp, tp, "eprt", parts, dp == 2 if ep is None else ep, **llm)
    assert codes == [0] * dp, "\n".join(log[-3000:] for log in logs)
    return [each for part in tokens for each in part], logs[0]


@pytest.fixture(scope="session")
def alone(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """vLLM in one process, with its own experts."""
    codes, logs, [tokens] = ranks_run(tmp_path_factory.mktemp("alone"), qwen3, "float32", 1, 1, "none", [PROMPTS])
    assert codes == [0], logs[0][-3000:]
    assert "eprt:" not in logs[0]
    assert len({tuple(each[:5]) for each in tokens}) == len(PROMPTS)  # the model isn't stuck on one token
    return tokens


@pytest.fixture
def placed(tmp_path: Path) -> dict[str, Any]:
    """Four ranks hold the experts backwards, some twice, in one slot none."""
    slots = [7, 6, 5, 4, 4, 0, 3, 2, 1, 0, 7, -1]
    value = {"format": "eprt expert placement", "version": 1, "num_experts": 8, "ep_size": 4, "layers": {"all": slots}}
    (tmp_path / "placement.json").write_text(json.dumps(value))
    return {"additional_config": {"eprt": {"placement": str(tmp_path / "placement.json")}}}


@pytest.mark.parametrize(
    ("dp", "tp", "ep", "ranks"),
    [
        (1, 1, False, "on this rank alone"),
        (1, 2, False, "on one of 2 ranks whose outputs are summed"),
        (2, 1, False, "on one of 2 ranks whose outputs are summed"),  # each has half of every expert
        (2, 1, True, "over 2 ranks"),
        (1, 2, True, "over 2 ranks (attention TP 2)"),  # they hold the same tokens, and eprt splits them
        (2, 2, True, "over 4 ranks"),  # vLLM splits the tokens of TP ranks itself
    ],
    ids=["one", "tp2-without-ep", "dp2-without-ep", "dp2", "tp2", "dp2-tp2-sequence-parallel-placed"],
)
def test_tokens_are_those_of_one_process(
    dp: int, tp: int, ep: bool, ranks: str, qwen3: Path, alone: list[list[int]], placed: dict[str, Any], tmp_path: Path
) -> None:
    options = placed if dp * tp == 4 else {}
    tokens, log = serve(tmp_path, qwen3, "float32", dp, tp, ep, first=3, **options)
    assert tokens == alone
    assert f"3 of 3 MoE layers (model.layers.0.mlp.experts to model.layers.2.mlp.experts) {ranks}: " in log
    assert log.count("eprt: ready") == 1  # one warm-up for all layers
    assert ("8 experts on 12 slots by the placement file, top-2" in log) == bool(options)


WAYS = ["reload", "direct", "layerwise", "reload", "direct"]


@pytest.fixture(scope="session")
def trained(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, list[list[int]]]]:
    return retrained(qwen3, [tmp_path_factory.mktemp(f"trained-{step}") for step in range(len(WAYS))])


@pytest.mark.parametrize("dp", [1, 2], ids=["one", "dp2-ep"])
def test_new_weights_in_every_way_that_trainers_have(
    dp: int, qwen3: Path, alone: list[list[int]], trained: list[tuple[Path, list[list[int]]]], tmp_path: Path
) -> None:
    """Five updates in a row of an engine that runs; after each, the tokens of a model made from that checkpoint."""
    updates = [(way, folder) for way, (folder, _) in zip(WAYS, trained, strict=True)]
    parts = [PROMPTS[:3], PROMPTS[3:]] if dp == 2 else [PROMPTS]
    codes, logs, ranks = ranks_run(tmp_path, qwen3, "float32", dp, 1, "eprt", parts, dp == 2, updates)
    assert codes == [0] * dp, "\n".join(log[-3000:] for log in logs)
    assert "3 of 3 MoE layers" in logs[0]
    for turn, want in enumerate([alone, *(want for _, want in trained)]):
        assert [each for rank in ranks for each in rank[turn]] == want, turn


def test_new_weights_of_all_experts_at_once(tmp_path: Path) -> None:
    """Llama-4's loader has one call for a rank's experts, by the first one's number."""
    first, _ = by_transformers(llama4_model(tmp_path / "model"))
    ways = ["reload", "direct", "layerwise"]
    trained = retrained(tmp_path / "model", [tmp_path / way for way in ways])
    updates = [(way, folder) for way, (folder, _) in zip(ways, trained, strict=True)]
    parts = [PROMPTS[:3], PROMPTS[3:]]
    codes, logs, ranks = ranks_run(tmp_path, tmp_path / "model", "float32", 2, 1, "eprt", parts, True, updates)
    assert codes == [0, 0], "\n".join(log[-3000:] for log in logs)
    assert "2 of 2 MoE layers" in logs[0]
    for turn, want in enumerate([first, *(want for _, want in trained)]):
        assert [each for rank in ranks for each in rank[turn]] == want, turn


BALANCED: dict[str, Any] = {  # --enable-eplb with plans every four steps, and two spare slots
    "enable_eplb": True,
    "eplb_config": {"window_size": 4, "step_interval": 4, "num_redundant_experts": 2, "log_balancedness": True},
}


def test_experts_move_under_load_through_sleep_and_updates(
    qwen3: Path, alone: list[list[int]], trained: list[tuple[Path, list[list[int]]]], tmp_path: Path
) -> None:
    """vLLM's own flags for EPLB, DBO (which its CPU build turns off) and sleep mode in one engine, with updates."""
    (first, first_tokens), (second, second_tokens) = trained[:2]
    updates = [("again", ""), ("sleep", ""), ("reload", first), ("again", ""), ("layerwise", second)]
    want = [alone, alone, alone, first_tokens, first_tokens, second_tokens]
    flags = BALANCED | {"enable_dbo": True, "enable_sleep_mode": True}
    parts = [PROMPTS[:3], PROMPTS[3:]]
    codes, logs, ranks = ranks_run(
        tmp_path, qwen3, "float32", 2, 1, "eprt", parts, updates=updates, as_gpu=True, **flags
    )
    assert codes == [0, 0], "\n".join(log[-3000:] for log in logs)
    for turn, tokens in enumerate(want):
        assert [each for rank in ranks for each in rank[turn]] == tokens, turn
    assert logs[0].count("--enable-eplb moves the experts of eprt's layers") >= 1
    assert "8 experts on 10 slots balanced" in logs[0]
    assert len(re.findall(r"eprt: experts of [1-3] of 3 layers move", logs[0])) >= 3


@pytest.mark.parametrize("what", ["update", "move"])
def test_a_rank_killed_while_experts_change_is_named_and_nobody_answers(
    what: str, qwen3: Path, trained: list[tuple[Path, list[list[int]]]], tmp_path: Path
) -> None:
    checkpoint = trained[0][0] if what == "update" else ""
    parts = [PROMPTS[:3], PROMPTS[3:]]
    codes, logs, ranks = ranks_run(
        *(tmp_path, qwen3, "float32", 2, 1, "eprt", parts),
        updates=[("again", ""), (f"die in {what}", checkpoint)],
        as_gpu=True,
        **BALANCED,
    )
    assert 0 not in codes
    assert ranks == [[], []]
    assert re.search(r"eprt: rank 1 exited: .*is gone", logs[0]), logs[0][-4000:]


def test_a_draft_model_beside_lora_of_attention(
    qwen3: Path, alone: list[list[int]], trained: list[tuple[Path, list[list[int]]]], tmp_path: Path
) -> None:
    """The draft, of other weights, has MoE layers of its own; some of what it proposes is refused."""
    draft = {"model": str(trained[0][0]), "method": "draft_model", "num_speculative_tokens": 2}
    lora = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["q_proj", "v_proj"]}
    llm: dict[str, Any] = lora | {"speculative_config": draft}
    tokens, log = serve(tmp_path, qwen3, "float32", **llm)
    assert tokens == alone
    assert "6 of 6 MoE layers (model.layers.0.mlp.experts to draft_model.model.layers.2.mlp.experts)" in log


def decoded(folder: Path) -> list[list[int]]:
    """vLLM itself has no MXFP4 experts on CPU; transformers decodes them. It computes in float32 here, vLLM in bf16: of
    twenty checkpoints and more the one is taken whose best token leads the next by most."""
    from transformers import AutoModelForCausalLM

    want, lead = by_transformers(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float())
    assert lead > 0.025  # bf16's own differences from float32 reach 0.02 of these logits' deviation
    return want


@pytest.fixture(scope="session")
def gpt_oss_tokens(gpt_oss: Path) -> list[list[int]]:
    return decoded(gpt_oss)


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2)], ids=["dp2-ep", "tp2-without-ep"])
def test_mxfp4_tokens_are_those_of_transformers(
    dp: int, tp: int, gpt_oss: Path, gpt_oss_tokens: list[list[int]], tmp_path: Path
) -> None:
    tokens, log = serve(tmp_path, gpt_oss, "bfloat16", dp, tp)
    assert tokens == gpt_oss_tokens
    assert "mxfp4, 8 experts, top-4" in log


def test_a_part_that_cuts_a_scale_is_gpt_osss_loaders(tmp_path: Path) -> None:
    """Of 96 rows one rank has 64 and the other 32, and zeros."""
    from eprt.conformance.tiny_model import write_tiny_checkpoint

    folder = write_tiny_checkpoint(tmp_path / "model", num_layers=2, intermediate_size=96, seed=34)
    tokens, log = serve(tmp_path, folder, "bfloat16", 1, 2)
    assert tokens == decoded(folder)
    assert "mxfp4, 8 experts, top-4, 128 x 64" in log


def test_experts_are_chosen_by_eprt_in_a_gates_place(
    gpt_oss: Path, gpt_oss_tokens: list[list[int]], tmp_path: Path
) -> None:
    codes, logs, [tokens] = ranks_run(tmp_path, gpt_oss, "bfloat16", 1, 1, "eprt", [PROMPTS], ep=False, gates=True)
    assert codes == [0], logs[0][-3000:]
    assert "of 2 layers the gate and the choice of experts are eprt's, too" in logs[0]
    assert tokens == gpt_oss_tokens
    # vLLM still records the choice, which trainers replay (--enable-return-routed-experts).
    heard, want = Counter(), Counter(row for rows in experts_by_transformers(gpt_oss, tokens) for row in rows)
    for layer, rows in json.loads(next(tmp_path.glob("*.experts")).read_text()).items():
        heard.update((int(layer), *sorted(row)) for row in rows)
    assert heard.total() == want.total()
    assert (heard & want).total() > 0.9 * want.total()  # bf16 and float32 part where two experts are nearly alike


@pytest.mark.parametrize(
    ("write", "llm"),
    [(glm4_model, {}), (gemma4_model, {}), (llama4_model, {}), (qwen2_model, {"model_impl": "transformers"})],
    ids=["glm-4.5", "gemma-4", "llama-4", "qwen2-moe"],
)
def test_other_routers_and_activations(write: Callable[[Path], Any], llm: dict[str, Any], tmp_path: Path) -> None:
    """GLM-4.5 chooses as DeepSeek-V3 does: groups of experts, by a bias that vLLM keeps beside the experts. Gemma 4's
    experts are of GELU; their weights have a scale for each expert. Llama-4's router scales what an expert gets.
    Qwen2-MoE is transformers' own code inside vLLM."""
    want, lead = by_transformers(write(tmp_path / "model"))
    assert lead > 1e-4  # float32 on both sides, sums in another order
    tokens, log = serve(tmp_path, tmp_path / "model", "float32", dp=2, **llm)
    assert tokens == want
    assert "2 of 2 MoE layers" in log


def test_what_of_vllms_models_reaches_into_a_layer_is_known() -> None:
    """Such code finds eprt's `Kernel` there, or parameters that were freed, or counts on partial sums, so its model's
    layers are left to vLLM: by its module or by its option."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    root = Path(str(spec.origin)).parent
    reaches = re.compile(r"\.moe_kernel\b|routed_experts\.w(13|2)_weight[,.)]|skip_final_all_reduce = True")
    paths = (path for path in root.glob("**/models/**/*.py") if not {"amd", "cpu", "xpu"} & {*path.parts})
    readers = [path for path in paths if reaches.search(path.read_text())]
    names = [".".join(path.relative_to(root.parent).with_suffix("").parts) for path in readers]
    others = [name for name in names if not (RUNNERS.match(name) or SUMMING.match(name))]
    decodes = [root / "models" / name.split(".")[2] / "nvidia/specialized_decode/__init__.py" for name in others]
    assert all(f'"{DECODE}"' in path.read_text() for path in decodes), others


@pytest.mark.parametrize("strict", [False, True])
def test_what_eprt_cannot_run_is_left_to_vllm(
    strict: bool, qwen3: Path, alone: list[list[int]], tmp_path: Path
) -> None:
    """Default flags: on CPU vLLM compiles the experts' call into its graph."""
    options: dict[str, Any] = {"additional_config": {"eprt": {"strict": True}}} if strict else {}
    codes, logs, tokens = ranks_run(
        tmp_path, qwen3, "float32", 1, 1, "eprt", [PROMPTS], ep=False, enforce_eager=False, **options
    )
    assert "on CPU vLLM compiles the experts' call into its graph: --enforce-eager gives them to eprt" in logs[0]
    assert (codes == [0]) != strict, logs[0][-3000:]
    assert strict or tokens[0] == alone


def served_command(model: Path, port: int) -> list[str]:
    """The command of docs/vllm.md for this model, with what a CPU needs."""
    page = (ROOT / "docs" / "vllm.md").read_text()
    line, *_ = re.findall(r"^VLLM_PLUGINS=eprt (vllm serve MODEL .*)$", page, flags=re.MULTILINE)
    words = [str(model) if word == "MODEL" else word for word in shlex.split(line)]
    more = f"--enforce-eager --dtype float32 --max-model-len 128 --max-num-seqs 8 --port {port}"
    return words + more.split()


def test_a_server_answers_and_names_the_rank_that_dies(qwen3: Path, alone: list[list[int]], tmp_path: Path) -> None:
    port = free_port()
    log = tmp_path / "server.log"
    with log.open("wb") as stream:
        environment = os.environ | {"VLLM_PLUGINS": "eprt"}
        command = served_command(qwen3, port)
        server = subprocess.Popen(command, stdout=stream, stderr=stream, env=environment, start_new_session=True)
    try:
        answers = [complete(server, log, port, *prompt) for prompt in PROMPTS[:2]]
        assert answers == [" ".join(map(str, tokens)) for tokens in alone[:2]]
        victim = rank_process(server.pid, log, 1)
        os.kill(victim, signal.SIGKILL)
        server.wait(120)
        assert server.returncode != 0
    finally:
        end(server)
    text = log.read_text(errors="replace")
    assert re.search(rf"eprt: rank 1 exited: process {victim} is gone; .* missed by rank 0", text), text[-4000:]


def complete(server: subprocess.Popen[bytes], log: Path, port: int, ids: list[int], added: int) -> str:
    """The text of one greedy completion, waiting for the server to come up."""
    body = {"prompt": ids, "max_tokens": added, "temperature": 0, "ignore_eos": True}
    deadline = time.monotonic() + LIMIT_S
    while True:
        assert server.poll() is None, log.read_text(errors="replace")[-4000:]
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return json.loads(response.read())["choices"][0]["text"].strip()
        except ConnectionError:
            pass
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionError):
                raise
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-4000:]
        time.sleep(1)


def rank_process(server: int, log: Path, rank: int) -> int:
    """The process that holds this EP rank's experts, by the name that vLLM prints before its lines."""
    lines = re.findall(
        rf"\(Worker_DP{rank}_EP{rank} pid=(\d+)\)|\(EngineCore_DP{rank} pid=(\d+)\)", log.read_text(errors="replace")
    )
    workers = [int(worker) for worker, _ in lines if worker]
    return workers[0] if workers else int(lines[0][1])
