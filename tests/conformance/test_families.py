"""Every folder of transformers with experts: greedy tokens over the ranks, one of them idle, are those of one process.

Each is a tiny model in its published checkpoint format, loaded by `load_without_experts` and `parallelize`: eprt's own
reader where it has one, else transformers' own blocks with experts by eprt.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="pip install 'eprt[transformers]'")

import torch
import transformers
from safetensors.torch import load_file, save_file
from support.cases import tiny_families
from support.cases.broken_files import change_config
from support.cases.model_recipes import scratch
from support.cases.tiny_families import REASONS, folders
from support.jobs import family_jobs as jobs
from support.libraries import folder
from torch import nn

from eprt.cli import main
from eprt.config import ParallelConfig
from eprt.errors import CheckpointError, ConfigError, UsageError
from eprt.integrations.transformers import agreement, load_without_experts, parallelize, spread
from eprt.models import has_family
from eprt.models.checkpoint import SINGLE
from eprt.placement import ExpertPlacement
from eprt.placement.file import PlacementFile
from eprt.world import World

pytestmark = pytest.mark.skipif(
    not (folder("transformers") / "distributed/expert_parallel.py").exists(), reason="transformers >= 5.23"
)

PROMPTS: list[list[list[int]]] = [[[5, 17, 33, 8], [41, 9, 60]], [], [[7, 3]], [[30]]]
ACCEPTED = 66
# Counts and placement files go by the model's own numbers, dense layers before the first MoE layer included.
NUMBERS = {"afmoe": (1,), "deepseek_v3": (1,), "ernie4_5_vl_moe": (0, 2, 1, 3)}
TESTED = [name for name in folders() if name not in REASONS]
SHARD = ExpertPlacement(tiny_families.NUM_EXPERTS, ParallelConfig(4)).shard(1)
TEXT = [f"{name}:text" for name in ("dots3_note", "llama4", "qwen3_5_moe", "qwen4_exp") if name in TESTED]


@functools.cache
def saved(name: str) -> str:
    """The folder of all models that were saved."""
    folder = scratch("families")
    tiny_families.tiny_model(name).save_pretrained(folder / name)
    return str(folder)


@pytest.fixture(scope="module")
def outcomes(pools_of_this_file):
    """By number of ranks, of each folder what every rank found; one process a rank for all of them."""

    @functools.cache
    def run(size: int) -> list[dict[str, jobs.Outcome]]:
        folder, prompts = [saved(name) for name in TESTED][-1], PROMPTS[:size]
        return pools_of_this_file(size).run(
            jobs.continue_families, names=TESTED + TEXT, folder=folder, prompts=prompts, timeout_s=500.0
        )

    return run


@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", TESTED + TEXT)
def test_greedy_tokens_are_those_of_one_process(outcomes, name: str, size: int) -> None:
    for rank, each in enumerate(by_rank[name] for by_rank in outcomes(size)):
        assert each.error == "", f"rank {rank}"
        assert each.found == each.expected, f"rank {rank}"
        assert each.told == (), f"rank {rank}"
        assert each.layers
        assert each.layers == NUMBERS.get(name, each.layers)
        assert len(each.expected) == len(PROMPTS[rank])


def test_tokens_tell_gate_from_up() -> None:
    """Experts decide what comes out: a model with both exchanged says something else."""
    blind: list[str] = []
    for name in TESTED:
        model = tiny_families.tiny_model(name)
        before = jobs.alone(model, PROMPTS[0][0])
        tiny_families.swap_halves(model)
        blind += [name] if jobs.alone(model, PROMPTS[0][0]) == before else []
    assert blind == []


def test_kimi_k2_runs_by_the_code_of_deepseek_v3(tmp_path: Path) -> None:
    """Its checkpoints bring their own, with a config of a name that transformers knows."""
    model = tiny_families.tiny_model("deepseek_v3")
    model.save_pretrained(tmp_path)
    own_code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    change_config(tmp_path, model_type="kimi_k2", auto_map=own_code)
    with World.from_env("cpu") as world, torch.no_grad():
        ours = load_without_experts(tmp_path, dtype=torch.float32).eval()
        parallelize(ours, world)
        prompt = torch.tensor(PROMPTS[0][:1])
        torch.testing.assert_close(ours(prompt).logits, model(prompt).logits, rtol=1e-4, atol=1e-4)
    theirs = type(
        "DeepseekV3Config", (transformers.PretrainedConfig,), {"__module__": "transformers_modules.of_a_checkpoint"}
    )
    with pytest.raises(ConfigError, match="takes no DeepseekV3Config of the checkpoint's own code: leave trust_remote"):
        load_without_experts(tmp_path, config=theirs())  # as trust_remote_code=True finds it


@pytest.mark.parametrize("name", ["gemma4", "jamba"])
def test_a_rank_reads_its_own_experts_only(tmp_path: Path, name: str) -> None:
    """Stacked tensors, and one tensor an expert: of four ranks one reads a quarter of the bytes, which are its own."""
    model = tiny_families.tiny_model(name)
    model.save_pretrained(tmp_path)
    empty = load_without_experts(tmp_path, dtype=torch.float32, model_class=type(model))
    wanted = 0
    with closing(spread.open_source(empty, None)) as source:
        for path, experts in source.modules.items():
            whole = source.parameters(experts)
            for tensor_name, found in source.own_tensors(path, whole, SHARD).items():
                expected = model.get_parameter(f"{path}.{tensor_name}")[list(SHARD.experts)]
                torch.testing.assert_close(found, expected, rtol=0, atol=0)
                wanted += expected.nbytes
        assert isinstance(source, spread.CheckpointSource)
        assert source.checkpoint.bytes_read == wanted > 0
    next(iter(source.modules.values())).__dict__["eprt_place"] = None
    with pytest.raises(UsageError, match="parallelized already"):
        spread.open_source(empty, None)


def test_experts_of_text_and_of_images_lie_where_their_own_placements_say() -> None:
    parallel, E = ParallelConfig(2), tiny_families.NUM_EXPERTS
    placed = PlacementFile(E, 2, {number: (number, *(e for e in range(E) if e != number)) for number in range(4)})
    source = spread.open_source(tiny_families.tiny_model("ernie4_5_vl_moe"), None)
    first = {
        tuple(path.split(".")[-4::2]): source.placement(path, parallel, placed).slots[0] for path in source.modules
    }
    assert first == {("0", "text_moe"): 0, ("0", "vision_moe"): 2, ("1", "text_moe"): 1, ("1", "vision_moe"): 3}


def test_a_block_that_broke_off_leaves_no_call_out_later() -> None:
    """Experts for images that ran in a broken forward are called without tokens in the next, whose batch has none."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.images, self.text = nn.Identity(), nn.Identity()

        def forward(self, x: torch.Tensor, images: bool, breaks: bool) -> torch.Tensor:
            x = self.images(x) if images else x
            if breaks:
                raise UsageError("broken off")
            return self.text(x)

    block, idle = Block(), []
    for name, experts in block.named_children():
        experts.__dict__["eprt_place"] = SimpleNamespace(idle=lambda name=name: idle.append(name))
    spread._count_calls(block, [*block.children()])
    with pytest.raises(UsageError, match="broken off"):
        block(torch.ones(1), images=True, breaks=True)
    block(torch.ones(1), images=False, breaks=False)
    assert idle == ["images"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda held, key: held.pop(key),
            r"down_proj of this rank's experts has shape \(1, 64, 48\): expected \(2, 64, 48\)",
        ),
        (
            lambda held, key: held.update({key: held[key][1:]}),
            r"experts can't be read: \S*down_proj: stack expects each",
        ),
        (
            lambda held, key: [held.pop(name) for name in list(held) if name.startswith(key.partition(".3.")[0])],
            r"the experts of model\.layers\.0\.feed_forward\.experts can't be read: no tensor of theirs",
        ),
    ],
    ids=["missing", "cut", "none"],
)
def test_an_expert_that_is_not_as_the_others(tmp_path: Path, change, said: str) -> None:
    tiny_families.tiny_model("jamba").save_pretrained(tmp_path)
    held = load_file(tmp_path / SINGLE)
    change(held, "model.layers.0.feed_forward.experts.3.down_proj.weight")
    save_file(held, tmp_path / SINGLE, metadata={"format": "pt"})
    with closing(spread.open_source(load_without_experts(tmp_path), None)) as source:
        path, experts = next(iter(source.modules.items()))
        with pytest.raises(CheckpointError, match=said):
            source.own_tensors(path, source.parameters(experts), SHARD)


@pytest.mark.skipif("inkling2_loop" not in TESTED, reason="transformers >= 5.24")
def test_packed_experts_are_named_by_their_dtype(tmp_path: Path) -> None:
    """transformers unpacks Inkling 2's experts by scales of any shape; eprt says which tensor it can't read."""
    model = tiny_families.tiny_model("inkling2_loop")
    model.save_pretrained(tmp_path)
    held, key = load_file(tmp_path / SINGLE), "model.llm.layers.0.mlp.experts.w13_weight"
    held |= {
        key: held[key].to(torch.uint8),
        f"{key}_scale": torch.ones(8),
        f"{key}_outer_scale_denominator": torch.ones(()),
    }
    save_file(held, tmp_path / SINGLE, metadata={"format": "pt"})
    with closing(spread.open_source(load_without_experts(tmp_path, model_class=type(model)), None)) as source:
        path, experts = next(iter(source.modules.items()))
        with pytest.raises(CheckpointError, match="w13_weight' has dtype U8: expected BF16 or F32"):
            source.own_tensors(path, source.parameters(experts), SHARD)


def test_a_rank_without_tokens_calls_looped_layers_once_a_pass() -> None:
    world: Any = SimpleNamespace(num_dispatchers=0)
    model: Any = nn.ModuleList(nn.Identity() for _ in range(5))
    for module in model[1:]:
        module.eprt_place = agreement.Place(world, torch.bfloat16)
    text = SimpleNamespace(loop_layer_index_start=2, loop_layer_index_end=4, loop_num_passes=3)
    model.config = SimpleNamespace(get_text_config=lambda decoder: text)
    places = [module.eprt_place for module in model[1:]]
    found = agreement.agreement_of(model)
    assert found.places == places
    assert found.calls == [places[0], *(places[1:3] * 3), places[3]]


def test_a_checkpoint_of_several_models_gives_the_one_whose_class_is_asked_for(tmp_path: Path) -> None:
    """Qwen3-Omni as it is published: thinker and talker. The thinker alone is what the families' test loads."""
    fields = tiny_families.shrink(transformers.Qwen3OmniMoeConfig().to_dict()) | {"enable_audio_output": False}
    own = ("model_type", "architectures", "transformers_version", "_name_or_path")
    config = transformers.Qwen3OmniMoeConfig(**{name: fields[name] for name in fields if name not in own})
    whole = transformers.Qwen3OmniMoeForConditionalGeneration(config).eval().requires_grad_(False)
    for experts in (module for name, module in whole.named_modules() if name.endswith(".experts")):
        experts.down_proj.normal_()  # wrong ones show
    whole.save_pretrained(tmp_path)
    ids = torch.arange(5, 15).view(2, 5)
    with torch.no_grad(), World.from_env("cpu") as world:
        with pytest.raises(ConfigError, match=r"joins models .* parallelize\(model\.thinker, world\)"):
            parallelize(load_without_experts(tmp_path), world, jobs.RUNTIME)
        thinker = load_without_experts(tmp_path, model_class=type(whole.thinker))
        for model in (load_without_experts(tmp_path).thinker, thinker):
            parallelize(model, world, jobs.RUNTIME)
            torch.testing.assert_close(model(ids).logits, whole.thinker(ids).logits, rtol=1e-4, atol=1e-5)


def test_a_model_in_memory_whose_experts_hold_nan() -> None:
    source = spread.open_source(tiny_families.tiny_model("jamba"), None)
    path, experts = next(iter(source.modules.items()))
    experts.down_proj[3, 0, 0] = torch.nan
    with pytest.raises(CheckpointError, match=r"experts\.down_proj of experts .* holds nan at \[1, 0, 0\]"):
        source.own_tensors(path, source.parameters(experts), SHARD)


@pytest.mark.parametrize("name", ["afmoe", "jamba"])
def test_the_command_continues_a_family_without_a_reader(name: str, tmp_path: Path, capsys) -> None:
    """`eprt generate` on two ranks, one of them idle in the last round, gives transformers' own greedy tokens."""
    directory = f"{saved(name)}/{name}"
    assert not has_family(json.loads(Path(directory, "config.json").read_text()))
    prompts = [[5, 17, 33, 8], [41, 9, 60], [7, 3]]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    words = ["generate", "--model", directory, "--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "6"]
    assert main([*words, "--temperature", "0", "--world", "2", "--device", "cpu", "--batch", "1"]) == 0
    own = tiny_families.model_class(name).from_pretrained(directory)
    expected = [own.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0].tolist() for ids in prompts]
    found = [json.loads(line)["tokens"] for line in capsys.readouterr().out.splitlines()]
    assert found == [tokens[len(ids) :] for ids, tokens in zip(prompts, expected, strict=True)]


def test_so_many_folders_of_transformers_run() -> None:
    """A new version of transformers names its new folders here: they run, or have a reason in REASONS."""
    assert set(REASONS) <= set(folders()), "folders that this transformers hasn't got"
    assert len(TESTED) >= ACCEPTED, f"{len(TESTED)} of {len(folders())}"


def test_the_page_shows_every_folder() -> None:
    path = Path(__file__).parents[2] / "docs" / "figures" / "families.py"
    spec = importlib.util.spec_from_file_location("families_of_the_page", path)
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    text = page.PAGE.read_text()
    assert page.written(text) == text, "run python docs/figures/families.py"
