"""Graphs of decode steps under torchrun, whose ranks have hash seeds of their own: no order may depend on them.

EPRT_STARTS=60 starts as many; two are enough to see an order that two of three seeds change.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.cases.model_recipes import RECIPES, make_model
from support.jobs.generation_jobs import alone
from support.jobs.started_graphs import OPTIONS, PROMPTS
from support.libraries import needs

pytestmark = needs("transformers")

ROOT = Path(__file__).parents[2]
STARTS = int(os.environ.get("EPRT_STARTS", "2"))
NAMES = ("gpt_oss", "qwen3_moe")  # layers of two kinds, and of one


@pytest.fixture(scope="module", params=NAMES)
def model(request, tmp_path_factory) -> tuple[Path, list[list[list[int]]]]:
    """A checkpoint, and transformers' own tokens of each rank's prompts."""
    folder = tmp_path_factory.mktemp("starts") / request.param
    plain = make_model(RECIPES[request.param])
    plain.save_pretrained(folder)
    return folder, [[alone(plain, prompt, **OPTIONS) for prompt in prompts] for prompts in PROMPTS]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", range(STARTS // len(NAMES)))
def test_a_start_under_torchrun_with_random_hash_seeds(model, tmp_path: Path, number: int) -> None:
    folder, wanted = model
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    settings = {"PYTHON": sys.executable, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RANKS": "2"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    command = [ROOT / "launch/node.sh", ROOT / "tests/support/jobs/started_graphs.py", folder, tmp_path]
    found = subprocess.run(
        [str(word) for word in command], env=environment | settings, capture_output=True, text=True, timeout=110
    )
    assert found.returncode == 0, found.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [rank["tokens"] for rank in ranks] == wanted
    assert [rank["said"] for rank in ranks] == [[], []], "from graphs"
    assert ranks[0]["seed"] != ranks[1]["seed"], "one hash seed in all ranks: the test sees nothing"
