"""What each rank runs for test_generation.py: prompts continued over the world, by three ways of loading a model."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any
from unittest.mock import Mock, patch

import torch
import transformers
from transformers.distributed import DistributedConfig

from eprt.cli.generate_jobs import heard
from eprt.config import RuntimeConfig
from eprt.graphs import StepGraphs
from eprt.integrations.transformers import (
    expert_layers,
    generate,
    idle_step,
    load_without_experts,
    lockstep,
    parallelize,
    register_expert_parallel,
)
from eprt.integrations.transformers.agreement import agreement_of
from eprt.ranks.launcher import RankContext
from support.builders import BEHIND_S, said

RUNTIME = RuntimeConfig(executor="torch_grouped", max_tokens_per_rank=64)


def parallelized(context: RankContext, folder: str, dtype: torch.dtype, **_: Any):
    """The whole model on every rank, then its own experts spread."""
    model = load(folder, dtype)
    parallelize(model, context.world(timeout_s=BEHIND_S), RUNTIME)
    return model


def without_experts(context: RankContext, folder: str, dtype: torch.dtype, **_: Any):
    """Part 2: no rank holds another's experts."""
    model = load_without_experts(folder, dtype=dtype).eval()
    parallelize(model, context.world(timeout_s=BEHIND_S), RUNTIME)
    return model


def expert_parallel(context: RankContext, folder: str, dtype: torch.dtype, **sizes: Any):
    """Part 3: transformers' own loading, eprt's experts."""
    context.world(timeout_s=BEHIND_S)  # torch.distributed is up
    register_expert_parallel(RUNTIME)
    config = DistributedConfig(ep_size=context.size, ep_implementation="eprt", **sizes)
    return load(folder, dtype, distributed_config=config)


WAYS = {"parallelized": parallelized, "without_experts": without_experts, "expert_parallel": expert_parallel}


def load(folder: str, dtype: torch.dtype, **options: Any):
    found = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    return found.eval()


def alone(model: Any, prompt: list[int], **options: Any) -> list[int]:
    """Returns what transformers itself adds to a prompt, in one process."""
    ids = torch.tensor([prompt])
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def continue_prompts(
    context: RankContext,
    way: str,
    folder: str,
    prompts: list[list[list[int]]],
    dtype: torch.dtype,
    options: dict[str, Any],
    replays: bool = False,
    **sizes: Any,
) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """What follows this rank's prompts, and what was streamed. `replays`: the model must have got graphs, or none."""
    model = WAYS[way](context, folder, dtype, **sizes)
    streamed: list[tuple[int, int]] = []
    torch.manual_seed(context.rank)
    found = generate(model, prompts[context.rank], batch_size=2, on_token=lambda *one: streamed.append(one), **options)
    agreement = agreement_of(model)
    assert (agreement.decode is not None) == replays, agreement.decode
    layers = expert_layers(model)
    numbers = [layer.dispatcher.layer for layer in layers]
    assert numbers == sorted({*numbers}), "counts go by them"
    for layer in layers:
        layer.close()
    if way == "expert_parallel":
        for call in (model.state_dict, lambda: model.load_state_dict({}, strict=False)):
            assert "state_dict" in said(call)
        layers[0].world.close()  # transformers made groups of its own for this model
    return found, streamed


def idle_at_first(context: RankContext, folder: str, ids: torch.Tensor, **sizes: Any) -> list[torch.Tensor]:
    """Logits of this rank in two forwards, the model's first; in each another rank has none."""
    model = expert_parallel(context, folder, torch.float32, **sizes)
    found = []
    with torch.no_grad():
        for idle in (1, 0):
            if context.rank == idle:
                idle_step(model)
            else:
                found.append(model(ids, use_cache=False).logits)
    close(model)
    return found


def close(model: Any) -> None:
    """Closes an `expert_parallel` model's layers, and their World: transformers made groups of its own for it."""
    layers = expert_layers(model)
    for layer in layers:
        layer.close()
    layers[0].world.close()


def looped(known: torch.nn.Module, model: Any, prompts: list[list[int]], options: dict[str, Any]) -> list[list[int]]:
    """What `model.generate` itself adds to the prompts, in as many calls, in lockstep with ranks that may have none;
    they know the model as `known`."""
    with lockstep(known):
        return [alone(model, prompt, **options) for prompt in prompts]


def call_layers_sharded_alone(
    context: RankContext, folder: str, prompts: list[list[list[int]]], dtype: torch.dtype, options: dict[str, Any]
) -> list[list[int]]:
    """As `call_own_loop`, where FSDP shards the decoder's layers after `parallelize`, and not the model around them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = parallelized(context, folder, dtype)
    mesh = init_device_mesh("cpu", (context.size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return looped(model, model, prompts[context.rank], options)


def call_own_loop(
    context: RankContext,
    folder: str,
    prompts: list[list[list[int]]],
    dtype: torch.dtype,
    options: dict[str, Any],
    wrapped: bool,
    **sizes: Any,
) -> list[list[int]]:
    """What `model.generate` itself adds to this rank's prompts, in as many calls, in lockstep with the other ranks.
    `wrapped`: the ranks know the model inside another module, as PEFT's."""
    model = expert_parallel(context, folder, dtype, **sizes)
    known = torch.nn.ModuleDict({"base_model": model}) if wrapped else model
    found = looped(known, model, prompts[context.rank], options)
    close(model)
    return found


def crossed_models(context: RankContext, folder: str, ids: torch.Tensor, **sizes: Any) -> str:
    """What a rank is told that calls another model than the other rank, of two that were loaded alike."""
    models = [expert_parallel(context, folder, torch.float32, **sizes) for _ in range(2)]
    with torch.no_grad():
        found = said(lambda: models[context.rank](ids, use_cache=False))
    next(module.eprt_place for module in models[0].modules() if hasattr(module, "eprt_place")).world.close()
    return found


def batch_continuously(
    context: RankContext, folder: str, prompts: list[list[list[int]]], options: dict[str, Any]
) -> list[list[int]]:
    """What transformers' continuous batching adds to this rank's prompts, in lockstep with the other ranks."""
    model = without_experts(context, folder, torch.float32)
    batching = transformers.ContinuousBatchingConfig(max_batch_tokens=64, num_blocks=8, use_cuda_graph=False)
    answers = {}
    with lockstep(model):
        if own := prompts[context.rank]:
            answers = model.generate_batch(own, transformers.GenerationConfig(**options), batching)
    for layer in expert_layers(model):
        layer.close()
    return [answers[name].generated_tokens for name in sorted(answers)]


def two_allowed(number: int, _: torch.Tensor) -> list[int]:
    """The tokens that a prompt of this number may go on with."""
    return [10 + 10 * number, 11 + 10 * number]


def several_calls(
    context: RankContext, folder: str, calls: list[dict[str, Any]], dtype: torch.dtype | str = torch.float32
) -> list[dict[str, Any]]:
    """The tokens, streamed tokens, warnings of each call of `generate`, whose prompts and seeds are by rank, and the
    model's dtype."""
    world, found = context.world(timeout_s=BEHIND_S), []
    model = load_without_experts(folder, dtype=dtype).eval()
    layers = parallelize(model, world, RUNTIME)
    for call in calls:
        given = {"batch_size": 2} | call
        given["prompts"] = given["prompts"][context.rank]
        if seeds := given.pop("seeds", None):
            given["seeds"] = seeds[context.rank]
        if "stop_strings" in given:
            given["tokenizer"] = transformers.AutoTokenizer.from_pretrained(folder)
        streamed: dict[int, list[int]] = {}
        with heard() as said:
            if "num_beams" not in given:
                given["on_token"] = lambda n, token, to=streamed: to.setdefault(n, []).append(token)
            tokens = generate(model, **given)
        found.append({"tokens": tokens, "streamed": [streamed[n] for n in sorted(streamed)], "said": list(said)})
    for layer in layers:
        layer.close()
    return [each | {"dtype": str(model.dtype)} for each in found]


def without_memory(context: RankContext, folder: str) -> None:
    """Rank 1 runs out of memory inside a layer; as on GPUs, the others don't meet it in headers there."""
    world = context.world(timeout_s=10.0)
    world.compares_headers = lambda full: False
    model = load_without_experts(folder, dtype=torch.float32).eval()
    layers = parallelize(model, world, RUNTIME)
    if world.rank == 1:
        layers[-1].executor._flat = Mock(side_effect=torch.OutOfMemoryError("2 GiB more"))
    generate(model, [[5, 17, 33]], max_new_tokens=2)


@dataclass
class Loop:
    """One way of generating: tokens, the scores [sequences, V] of each step, rows of each forward of the model."""

    tokens: list[list[int]] = field(default_factory=list)
    scores: list[list[torch.Tensor]] = field(default_factory=list)  # of each prompt, a row a step
    forwards: list[tuple[int, int]] = field(default_factory=list)


def replayed_and_eager(
    context: RankContext,
    folder: str,
    prompts: list[list[list[int]]],
    dtype: torch.dtype,
    options: dict[str, Any],
    graphs: bool | tuple[int, ...] = True,
    calls: int = 1,
    runtime: RuntimeConfig = RUNTIME,
    other_graphs: tuple[int, ...] | None = None,
    breaks: type[RuntimeError] | None = None,
) -> dict[str, Any]:
    """The same prompts through `generate` with graphs, `calls` times, and without; the warnings of the first.
    `other_graphs`: those of the last rank. `breaks`: how the first capture ends."""
    world = context.world(timeout_s=BEHIND_S)
    model = load_without_experts(folder, dtype=dtype).eval().to(world.device)
    layers = parallelize(model, world, runtime)
    world.warmup(*layers)
    mine = prompts[context.rank % len(prompts)]
    if other_graphs is not None and context.rank == context.size - 1:
        graphs = other_graphs

    def run(graphs: bool | tuple[int, ...]) -> Loop:
        loop = Loop()
        embed = model.get_input_embeddings()
        given = {"batch_size": 2, "graphs": graphs, "logits_processor": [_Scores(loop)], **options}
        with embed.register_forward_pre_hook(lambda _, ids: loop.forwards.append(tuple(ids[0].shape))):
            loop.tokens = generate(model, mine, world, **given)
        return loop

    errors = [] if breaks is None else [breaks("not permitted when stream is capturing")]
    capture: Any = StepGraphs.capture

    def captured(graphs: StepGraphs, *given: Any) -> None:
        if errors:
            raise errors.pop()
        capture(graphs, *given)

    with heard() as said, patch.object(StepGraphs, "capture", captured):
        replayed = [run(graphs) for _ in range(calls)]
    eager, buckets = run(False), list(world.buckets)
    world.warm, world.buckets = False, ()  # this World serves other tests
    for layer in layers:
        layer.close()
    return {"replayed": [asdict(each) for each in replayed], "eager": asdict(eager), "warned": said, "buckets": buckets}


class _Scores:
    """A logits processor that changes nothing: what each step's scores were."""

    def __init__(self, loop: Loop) -> None:
        self._loop, self._width = loop, 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] <= self._width or not self._loop.scores:  # another batch
            self._first = len(self._loop.scores)
            self._loop.scores += [[] for _ in range(len(ids))]
        self._width = ids.shape[1]
        for row, each in enumerate(scores.float().cpu()):
            self._loop.scores[self._first + row].append(each.clone())
        return scores


def compiled_and_eager(
    context: RankContext, folder: str, prompts: list[list[int]], new_tokens: list[int]
) -> dict[str, list[int]]:
    """Greedy tokens of this rank's prompt, as many as its number: by a compiled model inside `lockstep`, by the
    wrapped one and by a model that compiled itself inside `generate`, and by neither."""
    world = context.world(timeout_s=BEHIND_S)
    model = load_without_experts(folder, dtype=torch.float32).eval()
    layers = parallelize(model, world, RUNTIME)
    prompt, count = prompts[context.rank], new_tokens[context.rank]
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": max(count, 1)}
    mine = [prompt] if count else []
    found = {"eager": [token for row in generate(model, mine, **options) for token in row]}
    torch._dynamo.reset()
    whole = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    ids = torch.tensor([prompt])
    with torch.no_grad(), lockstep(whole):
        for _ in range(count):
            ids = torch.cat((ids, whole(ids, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
    found["lockstep"] = ids[0, len(prompt) :].tolist()
    found["wrapped"] = [token for row in generate(whole, mine, graphs=True, **options) for token in row]
    model.compile(backend="eager", dynamic=True)
    found["generate"] = [token for row in generate(model, mine, use_cache=False, **options) for token in row]
    for layer in layers:
        layer.close()
    return found
