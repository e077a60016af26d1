"""Every family: a model in memory, its MoE blocks replaced, gives the logits it gave before, idle ranks included."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers", reason="pip install 'eprt[transformers]'")

import torch
import transformers
from support.builders import NOTHING
from support.cases import tiny_families
from support.cases.model_checkpoints import DIALECTS, WRITERS
from support.cases.model_recipes import RECIPES, make_model
from support.jobs import integration_jobs as jobs

from eprt.config import RuntimeConfig
from eprt.conformance.tiny_model import write_tiny_checkpoint
from eprt.errors import CheckpointError, ConfigError, UsageError
from eprt.integrations.transformers import agreement, load_without_experts, parallelize
from eprt.integrations.transformers.load import find_checkpoint
from eprt.placement import EMPTY
from eprt.placement.file import PlacementFile
from eprt.ranks.launcher import WorldFailed
from eprt.world import World


@pytest.mark.parametrize(("model", "dispatcher"), [("gpt_oss", "none"), *((model, "torch") for model in RECIPES)])
def test_logits_are_the_models_own(pools, model: str, dispatcher: str) -> None:
    world = 4
    results = pools(world).run(jobs.compare_logits, name=model, dispatcher=dispatcher)
    errors = [error for error, *_ in results]
    # float32 on both sides; attention and embeddings are the same code, the experts sum in another order.
    assert max(errors) <= 1e-5, errors
    assert [error for error, count in zip(errors, jobs.PROMPTS, strict=True) if count] != [0.0] * 3, "nothing compared"
    for _, layers, before, after in results:
        assert layers == RECIPES[model].moe_layers
        assert after < before, "each rank keeps its share of the experts only"


@pytest.mark.parametrize("model", ["gpt_oss", "qwen3_moe"])
def test_logits_are_the_models_own_wherever_the_experts_lie(pools, tmp_path: Path, model: str) -> None:
    config = make_model(RECIPES[model]).config
    E = getattr(config, "num_local_experts", None) or config.num_experts
    spare = (-E) % 4 + 4
    slots = (*reversed(range(E)), *range(spare - 1), EMPTY)
    PlacementFile(E, 4, {None: slots}).write(tmp_path / "placement.json")
    results = pools(4).run(jobs.compare_logits, name=model, dispatcher="torch", placement=tmp_path / "placement.json")
    assert 0 < max(error for error, *_ in results) <= 1e-5, results
    PlacementFile(E + 1, 4, {None: (*slots[:-1], E)}).write(tmp_path / "other.json")
    with pytest.raises(WorldFailed, match=f"ConfigError: the placement file is for {E + 1} experts, layer . has {E}"):
        pools(4).run(jobs.compare_logits, name=model, dispatcher="torch", placement=tmp_path / "other.json")


@pytest.mark.parametrize("model", RECIPES)
def test_logits_are_those_of_the_saved_checkpoint(pools, tmp_path: Path, model: str) -> None:
    """Experts, routers and shared experts from the files, in the names under which the family is published."""
    make_model(RECIPES[model], seed=2).save_pretrained(tmp_path)
    results = pools(2).run(jobs.compare_logits, name=model, dispatcher="torch", checkpoint=str(tmp_path))
    errors = [error for error, *_ in results]
    assert max(errors) <= 1e-5, errors
    assert all(num_layers > 0 for _, num_layers, *_ in results)


def test_an_idle_rank_has_the_tokens_dtype_whatever_the_routers_is(pools) -> None:
    """ERNIE 4.5's router is float32 in a bf16 model; ranks that differ in dtype would refuse each other."""
    results = pools(4).run(jobs.compare_logits, name="ernie4_5_moe", dispatcher="torch", dtype=torch.bfloat16)
    # bf16 on both sides of one MoE layer; each rank's share rounds once more.
    assert 0.0 < max(error for error, *_ in results) <= 1e-2


@pytest.mark.parametrize(
    ("model", "dispatcher", "dtype"),
    [(m, d, torch.bfloat16) for m in (*WRITERS, *DIALECTS) for d in ("none", "torch") if d == "torch" or m in WRITERS],
)
def test_a_published_checkpoint_gives_the_plain_models_logits(
    pools, tmp_path: Path, model: str, dispatcher: str, dtype: torch.dtype
) -> None:
    """MXFP4 experts from the files, as tests/gpu/test_layers.py runs them, and those of other packers."""
    (WRITERS | DIALECTS)[model](tmp_path, hidden=64, intermediate=96)
    runtime = RuntimeConfig(dispatcher=dispatcher, executor="torch_grouped", max_tokens_per_rank=64)
    found = pools(4).run(jobs.compare_checkpoint_logits, folder=str(tmp_path), runtime=runtime, dtype=dtype)
    errors = [error for error, *_ in found]
    # The experts compute in bf16; attention, embeddings and heads are the same code on both sides.
    assert max(errors) <= 2e-2, errors
    assert min(error for error, count in zip(errors, jobs.PROMPTS, strict=True) if count) > 0.0, "nothing compared"


OTHERS = {  # a qwen3_moe checkpoint that isn't the model's -> what the error says of both
    "experts": ({"num_experts": 16}, "num_experts         16          8"),
    "top-k": ({"num_experts_per_tok": 3}, "top_k               3           2"),
    "renormalised": ({"norm_topk_prob": True}, "routing.renormalize  True        False"),
    "layer pattern": ({"decoder_sparse_step": 1}, "moe layers  [0, 1]      [1]"),
}


def test_mistakes_are_typed_errors(pools, tmp_path: Path) -> None:
    folders = {}
    for name, (fields, _) in OTHERS.items():
        folders[name] = str(tmp_path / name)
        recipe = RECIPES["qwen3_moe"]
        make_model(replace(recipe, fields=recipe.fields | fields)).save_pretrained(folders[name])
    folders["dtype"] = str(tmp_path / "dtype")
    make_model(RECIPES["qwen3_moe"], torch.bfloat16).save_pretrained(folders["dtype"])
    folders["family"] = str(write_tiny_checkpoint(tmp_path / "family", num_layers=1))
    found = pools(2).run(jobs.mistakes, folders=folders)
    expected = {
        **{
            name: ("ConfigError", "is a checkpoint of another qwen3_moe model", said)
            for name, (_, said) in OTHERS.items()
        },
        "dtype": ("ConfigError", "the model computes in float32", "is in bfloat16", "dtype=torch.bfloat16"),
        "family": ("ConfigError", "/family is a checkpoint of gpt_oss, the model is of qwen3_moe: give its own"),
        "one rank's files": ("CheckpointError: rank 1: /no/such/checkpoint",),
        "no experts": ("LlamaForCausalLM has no experts that eprt finds",),
        "no transformer": ("Linear has no config: expected a transformers model",),
        "router logits in the config": ("ConfigError", "output_router_logits"),
        "meta": ("ConfigError", "are on meta"),
        "meta experts": ("ConfigError", "parallelize(..., checkpoint=...)"),
        "no parameters": ("ConfigError", "no floating-point parameters"),
        "generate too early": ("UsageError", "call parallelize(model, world)"),
        "twice": ("UsageError", "parallelized already"),
        "router logits in a call": ("UnsupportedError", "output_router_logits=True"),
        "router logits without the head": ("UnsupportedError", "output_router_logits=True"),
        "save": ("UsageError", "save_pretrained"),
        "push": ("UsageError", "save_pretrained"),
        "state": ("UsageError", "state_dict or save_pretrained", "add adapters before parallelize"),
        "part of the state": ("UsageError", "state_dict or save_pretrained"),
        "load state": ("UsageError", "load_state_dict into a parallelized model"),
        "half": ("UsageError", "stays on cpu in torch.float32", "can't go to cpu in torch.float16"),
        "to meta": ("UsageError", "can't go to meta"),
        "to where it is": (NOTHING,),
        "other weights": ("WorldMismatch", "1 weights outside of the experts", "lm_head.weight the first"),
        "other packed weights": ("WorldMismatch", "model.layers.0.self_attn.q_proj.weight.numbers the first"),
        "other family": ("ConfigError", "is a checkpoint of {'qwen3_moe'}, the model is of {'jamba'}: give its own"),
        "meta head": ("ConfigError", "1 of the model's weights are on meta (lm_head.weight, ...)", "device_map"),
        "tensor parallel": ("ConfigError", "sharded over 2 ranks", "attention_tp_size is 1", "without tp_plan"),
        "pipeline parallel": ("ConfigError", "layers are spread over 2 ranks by pp_size"),
        "one layer's placement": ("ConfigError", "the placement file has no layer 1: it has 0"),
        "twice own block": ("UsageError", "parallelized already"),
        "a cache of two batches": ("ConfigError", "past_key_values for 2 batches"),
        "its newer name": ("ConfigError", "cache for 2 batches"),
        "negative prompts": ("ConfigError", "negative_prompt_ids for 2 batches"),
        "no head": ("ConfigError", "Qwen3MoeModel has no generate"),
        "inside a step": ("UsageError", "leave the step first"),
        "a stream that nobody reads on": (NOTHING,),
        "inside lockstep": ("UsageError", "lockstep or generate inside of lockstep, or in two threads at once"),
        "another model inside lockstep": ("UsageError", "the ranks call different models at once (rank 0 model"),
        "a forward broken off": ("UsageError", "between two layers"),
        "generate after it": (NOTHING,),
        "another forward broken off": ("UsageError", "between two layers"),
        "another model after it": (NOTHING,),
        "backward to a router": ("UsageError", "has no gradient"),
        "router logits in the config later": ("UnsupportedError", "output_router_logits=True"),
        "pickle own block": ("UsageError", "can't be pickled or deep-copied"),
        "deepcopy own block": ("UsageError", "can't be pickled or deep-copied"),
        "graphs": ("ConfigError", "graphs=8: expected True, False, or numbers of sequences"),
        "uint16 and a file's options": (NOTHING,),
        "seeds": ("ConfigError", "seeds [1, 2] for 1 prompts: expected a list with an int of 64 bits for each"),
        "a seed of numpy's": ("ConfigError", "for 1 prompts: expected a list with an int of 64 bits"),
        "one seed": ("ConfigError", "seeds 7 for 1 prompts"),
        "seeds of beams": ("ConfigError", "pass num_beams=1, or torch.manual_seed instead of seeds"),
        "half a batch": ("ConfigError", "batch_size 0.5: must be an int"),
        "a half more": ("ConfigError", "batch_size 2.5: must be an int"),
        "an end in text": ("ConfigError", "eos_token_id='</s>': expected a token id"),
        "a pad in text": ("ConfigError", "transformers refuses: ValueError: invalid literal for int()", "'<pad>'"),
        "a number in text": ("ConfigError", "transformers refuses: ValueError: invalid literal for int()", "'many'"),
        "a config of JSON": ("ConfigError", "transformers refuses: AttributeError: 'dict' object has no attribute"),
        "stop strings": ("ConfigError", "need the model's tokenizer"),
        "bad words in text": ("ConfigError", "refuses: ValueError: `bad_words_ids` has to be a non-empty list"),
        "drafts by some layers": ("ConfigError", "assistant_early_exit=1", "pass assistant_model or prompt_lookup"),
        "drafts by many ranks": ("ConfigError", "assistant_model is a parallelized JambaForCausalLM"),
        "an option that nobody knows": ("ConfigError", "refuses: ValueError", "['colour']"),
        "pickle": ("UsageError", "can't be pickled or deep-copied"),
        "deepcopy": ("UsageError", "can't be pickled or deep-copied"),
        "backward": ("UsageError", "has no gradient"),
        "empty prompt": ("InputError", "prompt 1 is (0,)"),
        "an idle rank": ("WorldMismatch", "operation"),
    }
    for rank, said in enumerate(found):
        for name, parts in expected.items():
            squeezed = " ".join(said[name].split())
            assert all(" ".join(part.split()) in squeezed for part in parts), f"rank {rank}, {name}: {said[name]!r}"
        assert said["the next call works"] == NOTHING
    assert "idle_step(model)" in found[0]["an idle rank"]
    assert "generate(model, prompts)" in found[0]["an idle rank"]
    assert found[0]["an error in a loop"].startswith("UsageError: rank 1: KeyError")
    assert found[1]["an error in a loop"].startswith("KeyError")


def test_a_lean_model_never_holds_nor_reads_another_ranks_experts(pools, tmp_path: Path) -> None:
    recipe = RECIPES["qwen3_moe"]
    sizes = {"hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 32}
    sizes |= {"num_hidden_layers": 6, "decoder_sparse_step": 1}
    model = make_model(replace(recipe, fields=recipe.fields | sizes), torch.bfloat16)
    size = {name: tensor.nbytes for name, tensor in model.state_dict().items()}
    experts = sum(count for name, count in size.items() if ".experts." in name)
    others = sum(size.values()) - experts
    model.save_pretrained(tmp_path)
    del model
    for peak, read, materialized in pools(4).run(jobs.load_lean, folder=str(tmp_path)):
        assert read == experts // 4
        assert 0 < materialized <= others
        # allocators keep a few MiB of what was freed
        assert peak <= others + experts // 4 + experts // 6 + (8 << 20), (peak, others, experts)


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("config.json", None, "config.json: no such file"),
        ("config.json", "{", "config.json: not valid JSON"),
        ("config.json", '{"model_type": "new"}', "transformers can't read its config.json: .*model type `new`"),
        ("model.safetensors.index.json", None, "no safetensors"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "b.safetensors"}}', "b.safetensors: no such file"),
    ],
)
def test_files_that_are_no_checkpoint(tmp_path: Path, file: str, text: str | None, said: str) -> None:
    write_tiny_checkpoint(tmp_path, num_layers=1)
    (tmp_path / file).unlink()
    if text is not None:
        (tmp_path / file).write_text(text)
    with pytest.raises(CheckpointError, match=said):
        load_without_experts(tmp_path)


def test_an_auto_class_leaves_experts_out_too(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, num_layers=1)
    model = load_without_experts(tmp_path, model_class=transformers.AutoModelForCausalLM)
    assert isinstance(model, transformers.GptOssForCausalLM)
    assert not any("experts" in name for name, _ in model.named_parameters())
    for kind, said in (("GptOssModel", "has no module model.layers.0.mlp"), ("AutoModelForCTC", "has no class for a")):
        with pytest.raises(ConfigError, match=f"{kind} {said}"):
            load_without_experts(tmp_path, model_class=getattr(transformers, kind))
    with World.from_env("cpu") as world:
        parallelize(model, world, RuntimeConfig(max_tokens_per_rank=16))
    with pytest.raises(UsageError, match="can't be pickled"):
        pickle.dumps(model)


CHANGES = {  # after the model was made, where only one of transformers and eprt would follow
    "block": (lambda model: setattr(model.model.layers[1].mlp.gate, "top_k", 1), "top_k is 1, by .* it is 2"),
    "config": (lambda model: setattr(model.config, "num_experts_per_tok", 1), "top_k is 2, by .* it is 1"),
    "weights": (
        lambda model: setattr(model.model.layers[1].mlp.gate, "norm_topk_prob", True),
        "norm_topk_prob is True, by .* it is False",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_router_that_is_not_as_the_config_says(change: str, tmp_path: Path) -> None:
    make_model(RECIPES["qwen3_moe"]).save_pretrained(tmp_path)
    changed, said = CHANGES[change]
    with World.from_env("cpu") as world:
        for checkpoint in (None, tmp_path):
            model = make_model(RECIPES["qwen3_moe"])
            changed(model)
            with pytest.raises(ConfigError, match=rf"model\.layers\.1\.mlp\.gate\.{said}: .* from_pretrained"):
                parallelize(model, world, checkpoint=checkpoint)


@pytest.mark.parametrize("name", ["mixtral", "afmoe"])
def test_experts_that_are_sharded_packed_or_spread_already(name: str) -> None:
    """Another library's shards have the whole shape and hold a part of it; packed numbers have scales elsewhere."""

    def fresh():
        model = make_model(RECIPES[name]) if name in RECIPES else tiny_families.tiny_model(name)
        return model, model.model.layers[1].mlp.experts

    with World.from_env("cpu") as world:
        model, experts = fresh()
        experts.down_proj.to_local = None  # as a DTensor has
        with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.experts\.down_proj is sharded .* before fully_shard"):
            parallelize(model, world)
        model, experts = fresh()
        experts.down_proj = torch.nn.Parameter(experts.down_proj.to(torch.float8_e4m3fn), requires_grad=False)
        with pytest.raises(
            ConfigError, match=r"down_proj is packed \(Parameter of torch.float8_e4m3fn\): .*dequantize"
        ):
            parallelize(model, world)
        model, experts = fresh()
        experts.eprt_place = agreement.Place(world, torch.float32)  # as `ep_implementation="eprt"` leaves it
        with pytest.raises(UsageError, match="parallelized already"):
            parallelize(model, world)


@pytest.mark.parametrize(("name", "wrapped"), [("mixtral", "base_layer"), ("afmoe", "original_module")])
def test_adapters_of_experts_would_be_lost(name: str, wrapped: str, tmp_path: Path) -> None:
    """PEFT isn't installed here: what it leaves on a model are its configs, wrappers, and `get_base_model`."""

    def fresh():
        return make_model(RECIPES[name]) if name in RECIPES else tiny_families.tiny_model(name)

    def adapted(model, **targets):
        model.peft_config = {"mine": SimpleNamespace(**targets)}
        return model

    fresh().save_pretrained(tmp_path)
    held = adapted(fresh(), target_modules={"experts"})
    block = held.model.layers[1].mlp
    block.experts = torch.nn.ModuleDict({wrapped: block.experts})
    with World.from_env("cpu") as world:
        for targets in (
            {"target_modules": {"q_proj"}, "target_parameters": ["experts.gate_up_proj"]},
            {"target_modules": r".*\.1\.mlp\.experts\.down_proj"},
        ):
            with pytest.raises(ConfigError, match=r"changes model\.layers\.\d\.mlp\.experts\.\w+_proj, .* merge it"):
                parallelize(adapted(load_without_experts(tmp_path), **targets), world)
        with pytest.raises(ConfigError, match=r"adapter \(mine\) changes model\.layers\.1\.mlp\.experts, which"):
            parallelize(held, world, checkpoint=tmp_path)
        if name == "mixtral":  # whose router eprt reads itself
            with pytest.raises(ConfigError, match=r"changes model\.layers\.0\.mlp\.gate, which"):
                parallelize(adapted(load_without_experts(tmp_path), modules_to_save=["gate"]), world)
        targets = {"target_modules": {"q_proj", "down_proj"}, "exclude_modules": r".*\.experts\..*"}
        kept = adapted(load_without_experts(tmp_path), **targets, target_parameters=None)
        assert parallelize(SimpleNamespace(get_base_model=lambda: kept), world)


@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": False},
        {"use_cache": False, "dtype": torch.float32, "attn_implementation": "eager"},
        {"subfolder": "inner", "torch_dtype": torch.float32},
        {"config": "inner"},
    ],
    ids=lambda options: " ".join(options),
)
def test_fields_of_the_config_and_folders_are_options_too(tmp_path: Path, options: dict, monkeypatch) -> None:
    write_tiny_checkpoint(tmp_path / "inner", num_layers=1)
    monkeypatch.chdir(tmp_path)
    model = load_without_experts("." if "subfolder" in options else "inner", **options)
    assert model.config.use_cache == options.get("use_cache", True)
    assert model.dtype == options.get("dtype", options.get("torch_dtype", torch.bfloat16))
    assert model.config._attn_implementation in ("eager", options.get("attn_implementation", "eager"))
    assert model.model.layers[0].mlp.checkpoint == Path("inner")
    with pytest.raises(UsageError, match=r"save_pretrained .* without its experts"):
        model.save_pretrained("saved")
    with pytest.raises(UsageError, match=r"save_pretrained .* without its experts"):
        model.push_to_hub("nobody/nowhere")
    assert not Path("saved").exists()


@pytest.mark.parametrize(
    "option",
    [{"variant": "fp16"}, {"use_safetensors": False}, {"key_mapping": {"^net": "model"}}, {"gguf_file": "a.gguf"}],
    ids=str,
)
def test_all_weights_come_from_the_files_of_the_experts(tmp_path: Path, option: dict) -> None:
    """Else attention would be another file's."""
    write_tiny_checkpoint(tmp_path, num_layers=1)
    with pytest.raises(ConfigError, match=f"{next(iter(option))}=.* leave it out"):
        load_without_experts(tmp_path, **option)


def test_packing_attention_while_it_is_loaded_leaves_the_experts_in_the_files(tmp_path: Path, monkeypatch) -> None:
    """transformers' FP8 puts modules of its own in the place of experts, too."""
    from transformers import FineGrainedFP8Config
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)  # it asks for a GPU
    tiny_families.tiny_model("flex_olmo").save_pretrained(tmp_path)
    packed = FineGrainedFP8Config(weight_block_size=(16, 16))
    model = load_without_experts(tmp_path, quantization_config=packed)
    assert model.model.layers[0].self_attn.q_proj.weight.dtype == torch.float8_e4m3fn
    assert not any(".experts." in name for name, _ in model.named_parameters())
    with World.from_env("cpu") as world:
        assert len(parallelize(model, world)) == tiny_families.LAYERS


def test_a_hub_id_is_found_in_the_cache(tmp_path: Path) -> None:
    revision = "0123456789abcdef0123456789abcdef01234567"
    folder = tmp_path / "models--someone--tiny"
    write_tiny_checkpoint(folder / "snapshots" / revision, num_layers=1)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)
    assert find_checkpoint("someone/tiny", cache_dir=tmp_path, local_files_only=True).name == revision
    with pytest.raises(CheckpointError, match="someone/else: no such directory, and no model"):
        find_checkpoint("someone/else", cache_dir=tmp_path, local_files_only=True)
    with pytest.raises(CheckpointError, match="no such directory"):
        find_checkpoint("/no/such/folder")
