"""benchmarks/vllm_duel.py: what it says of its rows, and that the models which it makes are ones that eprt reads."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from eprt.models import family_for

FOLDER = Path(__file__).parents[2] / "benchmarks"
FORMATS = {"gpt-oss": "mxfp4", "qwen3": "bf16", "qwen3-fp8": "fp8_block", "deepseek-v3": "fp8_block"}


@pytest.fixture
def duel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    import vllm_duel

    yield vllm_duel
    for name in ("vllm_duel", "vllm_models"):
        sys.modules.pop(name, None)


def row(plugin: str, start: int, step_ms: float, **changes: Any) -> dict[str, Any]:
    found = {"model": "qwen3", "plugin": plugin, "start": start, "batch": 32, "step_ms": step_ms, "ready_s": 50.0}
    return found | changes


def test_medians_of_all_starts_and_the_last_start_are_compared(duel: ModuleType) -> None:
    """One start's outlier changes nothing; the first start's time until ready, which compiles, isn't compared."""
    rows = [row("none", 0, 82.0), *[row("none", start, 5.0) for start in (0, 1)]]
    rows += [
        row("eprt", 0, 4.0, ready_s=400.0),
        row("eprt", 1, 4.5, ready_s=111.0),
        row("eprt", 1, 99.0, ready_s=111.0),
    ]
    assert duel.compare(rows) == [
        "qwen3, batch 32: vLLM 5.000 (5.000 to 82.000 of 3) ms, eprt 4.500 (4.000 to 99.000 of 3) ms, ratio 0.900, "
        "met (at most 0.95)",
        "qwen3, start 2: ready after 50.0 s with vLLM's own, 111.0 s with eprt, +61.0 s, MISSED (at most 60)",
    ]
    assert "ratio 0.900, MISSED (at most 0.85)" in duel.compare([each | {"model": "gpt-oss"} for each in rows])[0]
    assert duel.compare(rows[:3]) == [], "one side alone"


@pytest.mark.parametrize("name", FORMATS)
def test_its_models_are_families_with_experts_in_their_format(duel: ModuleType, name: str, tmp_path: Path) -> None:
    folder = duel.make_model(name, 2, tmp_path, tiny=True)
    hf = json.loads((folder / "config.json").read_text())
    family = family_for(hf)
    config = family.moe_config(hf, family.moe_layers(hf)[-1])
    assert config.weight_format == FORMATS[name]
    assert duel.LIMITS[name] == (0.85 if name == "gpt-oss" else 0.95)
