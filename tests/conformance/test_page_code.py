"""The Python blocks of the pages run, in order, on four gloo ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs.page_jobs import run_blocks

from eprt.conformance.tiny_model import write_tiny_checkpoint
from eprt.ranks.launcher import launch

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)


def test_in_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="pip install 'eprt[transformers]'")
    model = str(write_tiny_checkpoint(tmp_path / "tiny"))
    page = "transformers.md"
    found = launch(run_blocks, 4, timeout_s=110, page=page, blocks=blocks(page), names={"MODEL": model})
    assert [len(rank["tokens"]) for rank in found] == [2, 0, 0, 0]
    assert all(len(row) <= 8 for row in found[0]["tokens"])
    assert [rank["steady"] for rank in found] == [[found[0]["tokens"][0]]] * 4, "from graphs or not"
    assert found[0]["logits"] == (1, 3, 512)


def test_the_readme_on_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchrun, in this process: transformers' own tokens."""
    transformers = pytest.importorskip("transformers", reason="pip install 'eprt[transformers]'")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    model = str(write_tiny_checkpoint(tmp_path / "tiny"))
    (block,) = blocks("../README.md")
    names: dict[str, Any] = {"prompts": [[11, 42, 7], [5, 310]]}
    exec(block.replace("openai/gpt-oss-20b", model).replace("=64", "=6"), names)
    names["world"].close()
    own = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    for prompt, tokens in zip(names["prompts"], names["tokens"], strict=True):
        whole = own.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0].tolist()
        assert tokens == whole[len(prompt) :]


def test_in_your_own_engine() -> None:
    page = "own_engine.md"
    found = launch(run_blocks, 4, page=page, blocks=blocks(page), names={})
    assert [rank["n"] for rank in found] == [3, 3, 3, 3], "all ranks leave with the one that has the most steps"
    assert [rank["output"] for rank in found] == [(4, 64), (0, 64), (6, 64), (0, 64)]


def test_rl() -> None:
    page = "rl.md"
    found = launch(run_blocks, 4, page=page, blocks=blocks(page), names={})
    assert [rank["changed"] for rank in found] == [[True, True]] * 4


# What pages of fragments take for granted: a world, and how the tiny gpt-oss's first MoE layer is made.
GIVEN = """
import os, tempfile
import torch
import eprt
from eprt import RuntimeConfig
from eprt.models import build_layer

os.chdir(tempfile.mkdtemp(dir=FOLDER))
world = eprt.World.from_env()
SLOTS = (0, 1, 2, 3, 4, 5, 6, 7, 0, 0, 1, 1)

def made(runtime=None, slots=None):
    placement = slots and eprt.ExpertPlacement(8, world.parallel, slots=slots)
    layer = build_layer(eprt.load_layer(MODEL, 0, world.parallel, world.rank, placement), world, runtime)
    world.warmup(layer)
    return layer

def hidden(rows):
    return torch.randn(rows, layers[0].config.input_size, dtype=torch.bfloat16)
"""
FRAGMENTS: dict[str, list[str]] = {  # what stands for "..." in each block, or comes before it
    "README.md": ["prompts = [[5, 6, 7]] * world.rank"],
    "docs/balance.md": [
        "layers = [made(runtime, SLOTS)]; layers[0](hidden(5)); world.barrier()",
        "placements = [eprt.ExpertPlacement(8, world.parallel, slots=SLOTS[1:] + SLOTS[:1])]",
    ],
    "docs/how_it_works.md": [
        "layers = [made()]; num_tokens, n, input_ids = 3, 0, None; model = lambda _: layers[0](hidden(num_tokens))",
        "token = torch.arange(1 + world.rank); position = token * 0; table = hidden(8)\n"
        "def forward(token, position): return layers[0](table[token])\n"
        "def idle_step(layers): layers[0](hidden(0))",
        "model = MODEL",
    ],
    "docs/limits_and_errors.md": ["layers = [layer := made(runtime)]; hidden_states = hidden(1 + world.rank)"],
}


@pytest.mark.parametrize("page", FRAGMENTS)
def test_fragments(tmp_path: Path, page: str) -> None:
    pytest.importorskip("transformers", reason="pip install 'eprt[transformers]'")
    model = str(write_tiny_checkpoint(tmp_path / "tiny"))
    found = blocks(f"../{page}")
    assert len(found) == len(FRAGMENTS[page]), "a block without what it takes for granted"
    run = [GIVEN]
    for block, given in zip(found, FRAGMENTS[page], strict=True):
        block = re.sub(r"openai/gpt-oss-\d+b", model, block)
        run += [block.replace("\n...\n", f"\n{given}\n")] if "\n...\n" in block else [given, block]
    names = {"MODEL": model, "FOLDER": str(tmp_path)}
    left = launch(run_blocks, 4, timeout_s=110, page=page, blocks=run, names=names)
    match page:
        case "README.md":
            assert [len(rank["tokens"]) for rank in left] == [0, 1, 2, 3]
        case "docs/balance.md":
            assert [rank["counts"] for rank in left] == [(1, 8)] * 4
            assert len(list(tmp_path.glob("*/counts.json"))) == 4
        case "docs/how_it_works.md":
            assert [rank["logits"][0] for rank in left] == [1, 2, 3, 4]
        case _:
            assert [rank["output"][0] for rank in left] == [1, 2, 3, 4]


def test_every_page_with_python_is_run() -> None:
    """That of extending.md by test_plugins.py."""
    pages = {path.name for path in [*DOCS.glob("*.md"), DOCS.parent / "README.md"] if "```python" in path.read_text()}
    others = {"transformers.md", "own_engine.md", "extending.md", "rl.md"}
    assert pages == {Path(page).name for page in FRAGMENTS} | others
