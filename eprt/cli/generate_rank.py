"""The jobs of `eprt generate`: what each rank does."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eprt.config import RuntimeConfig
from eprt.ranks.launcher import RankContext


@dataclass(frozen=True)
class Job:
    """What to do: the same on every rank. `temperature` 0 is greedy."""

    directory: str
    max_new_tokens: int
    temperature: float
    seed: int
    batch: int
    graphs: bool
    max_tokens_per_rank: int
    timeout_s: float


@dataclass(frozen=True)
class Loaded:
    """What the plan chose, how many MoE layers there are, and whether text can be given."""

    layers: int
    tokenizer: bool
    dispatcher: str
    executor: str


@dataclass(frozen=True)
class Part:
    """One rank's share of a round: new tokens of each prompt, as text where there is a tokenizer; seconds it took."""

    tokens: list[list[int]]
    texts: list[str | None]
    seconds: float


def share(context: RankContext, prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What this rank has read. Rank 0's is taken."""
    return prompts


def load(context: RankContext, job: Job) -> Loaded:
    """The model without other ranks' experts, and its tokenizer if it has one. Collective."""
    from eprt.integrations.transformers import load_without_experts, parallelize

    world = context.world(timeout_s=job.timeout_s)
    finish(context)
    model = load_without_experts(job.directory, dtype="auto", device_map=None).eval().to(world.device)
    graphs = False if job.graphs else None  # of whole steps instead of layers
    runtime = RuntimeConfig(max_tokens_per_rank=job.max_tokens_per_rank, layer_graphs=graphs)
    layers = parallelize(model, world, runtime)
    world.warmup(*layers)
    tokenizer = _tokenizer(job.directory)
    context.cache["generate"] = _Held(model, tokenizer, layers)
    torch.manual_seed(job.seed + world.dp_rank)
    return Loaded(len(layers), tokenizer is not None, layers[0].plan.dispatcher, layers[0].plan.executor)


def generate(context: RankContext, job: Job, prompts: list[list[str | list[int]]]) -> Part:
    """Continue `prompts[rank]`. Collective."""
    from eprt.integrations.transformers import generate as continue_prompts

    held: _Held = context.cache["generate"]
    options: dict[str, Any] = {"max_new_tokens": job.max_new_tokens, "do_sample": job.temperature > 0}
    if job.temperature > 0:
        options["temperature"] = job.temperature
    started = time.perf_counter()
    tokens = continue_prompts(
        held.model,
        [held.ids(prompt) for prompt in prompts[context.rank]],
        batch_size=job.batch,
        graphs=job.graphs,
        **options,
    )
    seconds = time.perf_counter() - started
    return Part(tokens, [held.text(new) for new in tokens], seconds)


def finish(context: RankContext) -> None:
    """Give back what `load` made."""
    held: _Held | None = context.cache.pop("generate", None)
    if held is not None:
        held.close()


class _Held:
    """A loaded model and its tokenizer; the harness closes it with the rank."""

    def __init__(self, model: Any, tokenizer: Any, layers: list[Any]) -> None:
        self.model, self.tokenizer, self._layers = model, tokenizer, layers

    def ids(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        return list(self.tokenizer(prompt)["input_ids"])

    def text(self, tokens: list[int]) -> str | None:
        return None if self.tokenizer is None else str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def close(self) -> None:
        for layer in self._layers:
            layer.close()


def _tokenizer(directory: str) -> Any:
    """The checkpoint's, from its files alone; None if it has none."""
    if not any((Path(directory) / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)
