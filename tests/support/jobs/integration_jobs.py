"""What each rank runs for test_integration.py: a tiny transformers model, alone and then parallelized."""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import core_model_loading
from transformers.distributed import DistributedConfig

from eprt.config import RuntimeConfig
from eprt.conformance.oracle import relative_error
from eprt.errors import UsageError
from eprt.integrations.transformers import generate, idle_step, load_without_experts, lockstep, parallelize
from eprt.models.checkpoint import Checkpoint
from eprt.placement.file import PlacementFile
from eprt.ranks.launcher import RankContext
from support.builders import BEHIND_S, said
from support.cases import tiny_families
from support.cases.model_recipes import HEADS, RECIPES, VOCABULARY, make_model

PROMPTS = (5, 0, 9, 2)  # tokens of each rank's prompt; the second rank has none
DENSE = {name: value for name, value in HEADS.items() if name != "num_experts_per_tok"}


def compare_logits(
    context: RankContext,
    name: str,
    dispatcher: str,
    checkpoint: str | None = None,
    dtype: torch.dtype = torch.float32,
    placement: str | None = None,
) -> tuple[float, int, int, int]:
    """(relative error of the logits, MoE layers, parameters and buffers before, after) on this rank. `checkpoint`: a
    saved model with other numbers, which both sides then have."""
    world = context.world()
    model = make_model(RECIPES[name], dtype)
    if checkpoint is not None:
        model = _loaded(model, checkpoint, dtype)
    count = PROMPTS[world.rank % len(PROMPTS)]
    prompt = torch.randint(VOCABULARY, (1, count), generator=torch.Generator().manual_seed(world.rank))
    expected = model(prompt, use_cache=False).logits if count else None
    before = sum(tensor.numel() for tensor in model.state_dict().values())
    if checkpoint is not None:  # whatever is left of the model's own experts betrays itself
        for key, tensor in model.state_dict().items():
            if ".experts." in key:
                tensor.zero_()
    runtime = RuntimeConfig(dispatcher=dispatcher, executor="torch_grouped")
    layers = parallelize(model, world, runtime=runtime, checkpoint=checkpoint, placement=placement)
    world.warmup(*layers)
    after = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    error = 0.0
    for _ in range(2):
        if expected is None:
            idle_step(model)
        else:
            error = max(error, relative_error(model(prompt, use_cache=False).logits, expected))
    world.warm = False  # this World serves other tests, which build layers of their own
    for layer in layers:
        layer.close()
    return error, len(layers), before, after


def _loaded(model: torch.nn.Module, folder: str, dtype: torch.dtype) -> torch.nn.Module:
    """transformers' own reading of the folder."""
    return type(model).from_pretrained(folder, config=model.config, dtype=dtype).eval().requires_grad_(False)


NEAR_TIE = 0.06  # of the scores' spread: bf16 logits of a few units are wrong by a quarter of that at most


def compare_checkpoint_logits(
    context: RankContext, folder: str, runtime: RuntimeConfig, dtype: torch.dtype
) -> tuple[float, str, str]:
    """(relative error, dispatcher, executor) of this rank's logits, the experts read from `folder/published`, against
    transformers' own forward of `folder/plain`."""
    world = context.world(timeout_s=BEHIND_S)
    model = load_plain_model(f"{folder}/plain", dtype).to(world.device)
    count = PROMPTS[world.rank % len(PROMPTS)]
    with torch.no_grad():
        prompt = steady_prompt(model, count, world.rank).to(world.device) if count else None
        expected = None if prompt is None else model(prompt, use_cache=False).logits
        layers = parallelize(model, world, runtime, checkpoint=f"{folder}/published")
        error = 0.0
        if prompt is None:
            idle_step(model)
        else:
            error = relative_error(model(prompt, use_cache=False).logits, expected)
    plan = layers[0].plan
    for layer in layers:
        layer.close()
    return error, plan.dispatcher, plan.executor


def load_plain_model(folder: str, dtype: torch.dtype) -> torch.nn.Module:
    """All of it in one dtype: transformers 5.17 can't run a DeepSeek-V4 whose norms it keeps in float32."""
    config = transformers.AutoConfig.from_pretrained(folder)
    config._experts_implementation = "eager"
    return (
        transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).to(dtype).eval()
    )


def steady_prompt(model: torch.nn.Module, count: int, rank: int) -> torch.Tensor:
    """A prompt [1, count] none of whose tokens is routed by a near-tie, so that rounding can't choose other experts."""
    closest: list[float] = []

    def note(router, _, output) -> None:
        scores = output[0].float()
        if hasattr(router, "e_score_correction_bias"):
            scores = torch.nn.functional.softplus(scores).sqrt() + router.e_score_correction_bias.float()
        top = scores.topk(router.top_k + 1).values
        closest.append(float((top[:, -2] - top[:, -1]).min() / scores.std()))

    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    hooks = [router.register_forward_hook(note) for router in routers]
    try:
        for attempt in range(300):
            generator = torch.Generator().manual_seed(1000 * rank + attempt)
            prompt = torch.randint(3, VOCABULARY, (1, count), generator=generator)
            closest.clear()
            model(prompt.to(model.device), use_cache=False)
            if min(closest) > NEAR_TIE:
                return prompt
    finally:
        for hook in hooks:
            hook.remove()
    raise LookupError(f"no prompt of {count} tokens without a near-tie: give the routers larger weights")


class Packed(torch.Tensor):
    """A weight as torchao packs it: it computes little, and its numbers lie in tensors of its own."""

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers, self.zero_point = numbers, None

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "zero_point"], None

    @classmethod
    def __torch_dispatch__(cls, call, types, args=(), kwargs=None):
        if call is torch.ops.aten.detach.default:
            return cls(args[0].numbers)
        raise NotImplementedError(f"{call} of a packed weight")


def mistakes(context: RankContext, folders: dict[str, str]) -> dict[str, str]:
    """What is said to each mistake. `folders`: checkpoints of other models than this qwen3_moe."""
    world = context.world()
    runtime = RuntimeConfig(executor="torch_grouped", max_tokens_per_rank=64)
    found: dict[str, str] = {}

    def attempt(name: str, call) -> None:
        found[name] = said(call)

    def fresh(**fields):
        model = make_model(RECIPES["qwen3_moe"])
        for name, value in fields.items():
            setattr(model.config, name, value)
        return model

    for name, folder in folders.items():
        attempt(name, lambda folder=folder: parallelize(fresh(), world, runtime, checkpoint=folder))
    missing = "/no/such/checkpoint" if world.rank == 1 else folders["dtype"]
    attempt("one rank's files", lambda: parallelize(fresh().bfloat16(), world, runtime, checkpoint=missing))
    dense = transformers.LlamaForCausalLM(transformers.LlamaConfig(**DENSE, intermediate_size=32))
    attempt("no experts", lambda: parallelize(dense, world, runtime))
    attempt("no transformer", lambda: parallelize(torch.nn.Linear(2, 2), world, runtime))
    attempt("router logits in the config", lambda: parallelize(fresh(output_router_logits=True), world, runtime))
    attempt("meta", lambda: parallelize(fresh().to("meta"), world, runtime))
    meta_experts = fresh()
    meta_experts.model.layers[1].mlp.to("meta")
    attempt("meta experts", lambda: parallelize(meta_experts, world, runtime))
    bare = fresh()
    for module in bare.modules():
        module._parameters.clear()
    attempt("no parameters", lambda: parallelize(bare, world, runtime))
    with_own_block = tiny_families.tiny_model("jamba")
    other_files = folders["dtype"]
    attempt("other family", lambda: parallelize(with_own_block, world, runtime, checkpoint=other_files))
    with_own_block.lm_head.to("meta")
    attempt("meta head", lambda: parallelize(with_own_block, world, runtime))
    with_own_block = tiny_families.tiny_model("jamba")
    one_layers = PlacementFile(tiny_families.NUM_EXPERTS, world.size, {0: tuple(range(tiny_families.NUM_EXPERTS))})
    attempt("one layer's placement", lambda: parallelize(with_own_block, world, runtime, placement=one_layers))
    own_layers = parallelize(with_own_block, world, runtime)
    attempt("a forward broken off", lambda: broken_off(with_own_block))
    attempt("generate after it", lambda: generate(with_own_block, [[5]], max_new_tokens=1))
    with_own_block.model.layers[0].feed_forward.router.requires_grad_(True)
    with_own_block.lm_head.requires_grad_(True)
    attempt("backward to a router", lambda: with_own_block(torch.tensor([[5]])).logits.sum().backward())
    attempt("another forward broken off", lambda: broken_off(with_own_block))
    for layer in own_layers:
        layer.close()
    attempt("twice own block", lambda: parallelize(with_own_block, world, runtime))
    attempt("pickle own block", lambda: pickle.dumps(with_own_block))
    attempt("deepcopy own block", lambda: copy.deepcopy(with_own_block))
    sharded = fresh()
    sharded._tp_size = 2
    attempt("tensor parallel", lambda: parallelize(sharded, world, runtime))
    staged = fresh(distributed_config=DistributedConfig(pp_size=2))
    attempt("pipeline parallel", lambda: parallelize(staged, world, runtime))
    other = fresh()
    other.lm_head.weight.data[-1, -1] += world.rank
    attempt("other weights", lambda: parallelize(other, world, runtime))
    other = fresh()
    numbers = torch.full((32, 64), world.rank, dtype=torch.int8)
    other.model.layers[0].self_attn.q_proj.weight = torch.nn.Parameter(Packed(numbers), requires_grad=False)
    attempt("other packed weights", lambda: parallelize(other, world, runtime))
    model = fresh()
    attempt("generate too early", lambda: generate(model, [[5]]))
    layers = parallelize(model, world, runtime)
    ids = torch.tensor([[5, 6, 7]])
    attempt("another model after it", lambda: model(ids))
    attempt("twice", lambda: parallelize(model, world, runtime))
    attempt("router logits in a call", lambda: model(ids, output_router_logits=True))
    attempt("router logits without the head", lambda: model.model(ids, output_router_logits=True))
    attempt("save", lambda: model.save_pretrained("/nowhere"))
    attempt("push", lambda: model.push_to_hub("nobody/nowhere"))
    attempt("state", model.state_dict)
    attempt("part of the state", model.model.state_dict)
    attempt("load state", lambda: model.load_state_dict(fresh().state_dict(), strict=False))
    attempt("half", model.half)
    attempt("to meta", lambda: model.to("meta"))
    attempt("to where it is", lambda: model.to("cpu").float())
    attempt("pickle", lambda: pickle.dumps(model))
    attempt("deepcopy", lambda: copy.deepcopy(model))
    model.requires_grad_(True)
    attempt("backward", lambda: model(ids).logits.sum().backward())
    attempt("seeds", lambda: generate(model, [[5]], seeds=[1, 2]))
    attempt("a seed of numpy's", lambda: generate(model, [[5]], seeds=[np.int64(7)]))
    attempt("one seed", lambda: generate(model, [[5]], seeds=7))
    attempt("seeds of beams", lambda: generate(model, [[5]], seeds=[7], do_sample=True, num_beams=2))
    attempt("half a batch", lambda: generate(model, [[5]], batch_size=0.5))
    attempt("a half more", lambda: generate(model, [[5]], batch_size=2.5))
    attempt("an end in text", lambda: generate(model, [[5]], eos_token_id="</s>"))
    attempt("a pad in text", lambda: generate(model, [[5]], pad_token_id="<pad>"))
    attempt("a number in text", lambda: generate(model, [[5]], graphs=True, max_new_tokens="many"))
    attempt("a config of JSON", lambda: generate(model, [[5]][world.rank :], generation_config={"do_sample": False}))
    attempt("stop strings", lambda: generate(model, [[5]], stop_strings=["a"]))
    attempt("bad words in text", lambda: generate(model, [[5]][world.rank :], bad_words_ids="x"))
    attempt("drafts by some layers", lambda: generate(model, [[5]], assistant_early_exit=1))
    attempt("drafts by many ranks", lambda: generate(model, [[5]], assistant_model=with_own_block))
    attempt("an option that nobody knows", lambda: generate(model, [[5]], colour=3))
    attempt("graphs", lambda: generate(model, [[5]], graphs=8))
    two, cache = [[5], [6]], transformers.DynamicCache()
    attempt("a cache of two batches", lambda: generate(model, two, batch_size=1, past_key_values=cache))
    attempt("its newer name", lambda: generate(model, two, batch_size=1, cache=cache))
    attempt("negative prompts", lambda: generate(model, two, batch_size=1, negative_prompt_ids=ids))
    attempt("no head", lambda: generate(model.model, two))

    def inside_a_step() -> None:
        with world.step(4):
            generate(model, [[5]])

    attempt("inside a step", inside_a_step)
    attempt("a stream that nobody reads on", lambda: next(stream(model, ids)) if world.rank == 0 else [*stream(model)])
    attempt("inside lockstep", lambda: inside_lockstep(model, world.rank == 0))
    attempt("another model inside lockstep", lambda: inside_lockstep(model, world.rank == 0, with_own_block))
    model.config.output_router_logits = True
    attempt("router logits in the config later", lambda: model(ids))
    model.config.output_router_logits = False
    model.generation_config.update(do_sample=True, num_return_sequences=2, return_dict_in_generate=True)
    attempt("uint16 and a file's options", lambda: generate(model, [torch.tensor([5], dtype=torch.uint16)]))
    attempt("empty prompt", lambda: generate(model, [[5], []] if world.rank == 1 else [[5]]))

    def wrong_loop() -> None:
        with torch.no_grad(), lockstep(model):
            model(ids)
            if world.rank == 1:
                raise KeyError("mine")

    try:
        attempt("an error in a loop", wrong_loop)
    except KeyError as error:
        found["an error in a loop"] = f"KeyError: {error}"
    with torch.no_grad():  # rank 1 has no batch, and does something else
        attempt("an idle rank", (lambda: model(ids)) if world.rank == 0 else world.barrier)
        attempt("the next call works", lambda: model(ids))
    for layer in layers:
        layer.close()
    return found


def broken_off(model) -> None:
    """A forward that ends between two expert layers."""

    def out_of_memory(*_) -> None:
        raise UsageError("between two layers")

    second = model.model.layers[1].register_forward_pre_hook(out_of_memory)
    try:
        model(torch.tensor([[5]]))
    finally:
        second.remove()


def inside_lockstep(model, generates: bool, other=None) -> None:
    with lockstep(model):
        if generates:
            generate(other or model, [[5]])


def stream(model, *batches):
    with torch.no_grad(), lockstep(model):
        for batch in batches:
            yield model(batch).logits


def load_lean(context: RankContext, folder: str) -> tuple[int, int, int]:
    """(most bytes held beyond earlier ones while `folder` is loaded and spread, bytes of experts that eprt read, bytes
    that transformers read), on this rank. Pages of mapped files count as held."""
    world = context.world()
    runtime = RuntimeConfig(executor="torch_grouped", max_tokens_per_rank=16)
    experts, others = [0], [0]
    read, materialize = Checkpoint.read, core_model_loading._materialize_copy

    def note_read(self, name, *args, **options):
        found = read(self, name, *args, **options)
        experts[0] += found.nbytes if ".experts." in name else 0
        return found

    def note_materialize(*args, **options):
        found = materialize(*args, **options)
        others[0] += found.nbytes
        return found

    def load() -> list:
        model = load_without_experts(folder, dtype=torch.bfloat16)
        return parallelize(model, world, runtime)

    def held(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))

    for layer in load():  # what is imported and allocated once isn't the model's
        layer.close()
    Checkpoint.read, core_model_loading._materialize_copy = note_read, note_materialize
    try:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # Linux: VmHWM begins again
        before = held("VmRSS")
        layers = load()
        peak = held("VmHWM") - before
    finally:
        Checkpoint.read, core_model_loading._materialize_copy = read, materialize
    for layer in layers:
        layer.close()
    return peak, experts[0], others[0]


IDS = torch.arange(3, 21).view(2, 9)


def logits_from_files(context: RankContext, folder: str) -> torch.Tensor:
    """Logits of a model whose experts come from `folder` over the ranks, in float32."""
    model = load_without_experts(folder, dtype=torch.float32)
    layers = parallelize(model, context.world(), RuntimeConfig(executor="reference", max_tokens_per_rank=32))
    with torch.no_grad():
        found = model(IDS).logits
    for layer in layers:
        layer.close()
    return found
