"""How a duel compares an engine's own experts with eprt's inside it: medians, limits, models and memory."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from eprt.models import family_for

FORMATS = {"gpt-oss": "mxfp4", "gpt-oss-20b": "mxfp4", "qwen3": "bf16"}
FORMATS |= dict.fromkeys(("qwen3-30b-fp8", "qwen3-fp8", "deepseek-v3"), "fp8_block")


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a file of `benchmarks` by its name, for this test alone."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent.name == "benchmarks":
            del sys.modules[name]


def row(plugin: str, start: int, step_ms: float, **changes: Any) -> dict[str, Any]:
    found = {"model": "qwen3", "plugin": plugin, "start": start, "batch": 32, "step_ms": step_ms, "ready_s": 50.0}
    return found | changes


def test_medians_of_all_starts_and_the_last_start_are_compared(imported) -> None:
    """One start's outlier changes nothing; the first start's time until ready, which compiles, isn't compared."""
    duel, limit = imported("duel"), imported("vllm_duel").limit
    rows = [row("none", 0, 82.0), *[row("none", start, 5.0) for start in (0, 1)]]
    rows += [
        row("eprt", 0, 4.0, ready_s=400.0),
        row("eprt", 1, 4.5, ready_s=111.0),
        row("eprt", 1, 99.0, ready_s=111.0),
    ]
    assert duel.compare(rows, "vLLM", limit) == [
        "qwen3, batch 32: vLLM 5.000 (5.000 to 82.000 of 3) ms, eprt 4.500 (4.000 to 99.000 of 3) ms, ratio 0.900, "
        "met (at most 0.95)",
        "qwen3, start 2: ready after 50.0 s with vLLM's own, 111.0 s with eprt, +61.0 s, MISSED (at most 60)",
    ]
    gpt_oss = [each | {"model": "gpt-oss"} for each in rows]
    assert "ratio 0.900, MISSED (at most 0.85)" in duel.compare(gpt_oss, "vLLM", limit)[0]
    assert duel.compare(rows[:3], "vLLM", limit) == [], "one side alone"


def test_on_one_gpu_the_peer_is_the_quicker_backend_of_vllms_own(imported) -> None:
    one = {"model": "gpt-oss-20b", "dp": 1, "tp": 1}
    rows = [row(side, 0, ms, **one) for side, ms in (("none", 6.0), ("none:marlin", 5.0), ("eprt", 3.9))]
    rows += [row(side, 0, ms, what="prefill", **one) for side, ms in (("none", 600.0), ("eprt", 540.0))]
    assert imported("duel").compare(rows, "vLLM", imported("vllm_duel").limit) == [
        "gpt-oss-20b, batch 32: vLLM (marlin) 5.000 (5.000 to 5.000 of 1) ms, eprt 3.900 (3.900 to 3.900 of 1) ms, "
        "ratio 0.780, met (at most 0.8)",
        "gpt-oss-20b, prefill 32: vLLM 600.000 (600.000 to 600.000 of 1) ms, eprt 540.000 (540.000 to 540.000 of 1) "
        "ms, ratio 0.900, MISSED (at most 0.87)",
    ]


def test_under_sglang_the_peer_is_its_quicker_runner(imported) -> None:
    one = {"model": "gpt-oss-20b", "dp": 1, "tp": 1, "batch": 16}
    rows = [row(side, 0, ms, **one) for side, ms in (("none", 6.0), ("none:marlin", 5.0), ("eprt", 4.3))]
    assert imported("duel").compare(rows, "SGLang", imported("sglang_duel").limit) == [
        "gpt-oss-20b, batch 16: SGLang (marlin) 5.000 (5.000 to 5.000 of 1) ms, eprt 4.300 (4.300 to 4.300 of 1) ms, "
        "ratio 0.860, MISSED (at most 0.85)"
    ]


def test_each_gpus_memory_is_read(imported) -> None:
    peaks: list[int] = []
    imported("sglang_engine").highest(["0, 500\n", "1, 700\n", "0, 12800\n", "1, 650\n", "0, 900\n"], peaks)
    assert peaks == [12800, 700]
    end = "Load weight end. elapsed=2.70 s, type=GptOssForCausalLM, quant=mxfp4, avail mem=65.26 GB, mem usage"
    log = f"[08:33 DP0 TP0 EP0] {end}=13.21 GB.\n[08:33] Memory pool end\n[08:33 DP1 TP1 EP1] {end}=13.20 GB.\n"
    assert imported("sglang_engine").weights(log) == [13.21, 13.2]


@pytest.mark.parametrize("name", FORMATS)
def test_models_are_families_with_experts_in_their_format(imported, name: str, tmp_path: Path) -> None:
    hf = json.loads((imported("vllm_models").make_model(name, 2, tmp_path, tiny=True) / "config.json").read_text())
    family = family_for(hf)
    config = family.moe_config(hf, family.moe_layers(hf)[-1])
    assert config.weight_format == FORMATS[name]
    limit = imported("vllm_duel").limit(name, "batch", 32, one_gpu=False)
    assert limit == (0.85 if name.startswith("gpt-oss") else 0.95)


def test_sglang_steps_are_those_of_stretches_that_only_decode(imported) -> None:
    """By its own lines: not of another rank or batch, not with a prefill in it, not the one in which a batch ends."""

    def decoded(running: int, tokens: int, rate: float, rank: str = "", kind: str = "") -> str:
        counted = f"#running-req: {running}, #{kind}token: {tokens}, {kind}token usage: 0.00, cuda graph: True"
        return f"[17:37:04{rank}] Decode batch, {counted}, gen throughput (token/s): {rate}, #queue-req: 0"

    lines = [
        decoded(4, 90, 4000.0),  # of an earlier batch
        "[17:37:04] Prefill batch, #new-seq: 4, #new-token: 16, #running-req: 0, input throughput (token/s): 19.76",
        decoded(4, 36, 100.0),
        decoded(4, 100, 2000.0),
        decoded(4, 100, 10.0, " DP1 TP1 EP1"),
        decoded(4, 164, 1000.0, " DP0 TP0 EP0", "full "),  # where some layers attend to a window
        decoded(4, 0, 400.0),
        decoded(2, 8, 50.0),
        decoded(2, 9, 500.0),
    ]
    assert imported("sglang_engine").decode_ms("\n".join(lines), 4) == [2.0, 4.0]
