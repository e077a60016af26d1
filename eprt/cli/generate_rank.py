"""The jobs of `eprt generate`: each rank loads the model without other ranks' experts, and continues its prompts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eprt.config import RuntimeConfig
from eprt.ranks.launcher import RankContext


@dataclass(frozen=True)
class LoadedModel:
    """The number of MoE layers, whether text can be given, and the plan's choice."""

    layers: int
    tokenizer: bool
    dispatcher: str
    executor: str


@dataclass(frozen=True)
class Answers:
    """One rank's answers of a round: the new tokens of each prompt, as text where there is a tokenizer, and the
    seconds they took."""

    tokens: list[list[int]]
    texts: list[str | None]
    seconds: float


def share(context: RankContext, prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the prompts that this rank has read; the caller takes rank 0's."""
    return prompts


def load(
    context: RankContext, directory: str, runtime: RuntimeConfig, graphs: bool, seed: int, behind_s: float
) -> LoadedModel:
    """Loads the model without other ranks' experts, and its tokenizer if it has one. Collective."""
    from eprt.integrations.transformers import load_without_experts, parallelize

    world = context.world(timeout_s=behind_s)
    context.release("generate")
    model = load_without_experts(directory, dtype="auto", device_map=None).eval().to(world.device)
    layers = parallelize(model, world, runtime)
    world.warmup(*layers)
    tokenizer = _tokenizer(directory)
    context.cache["generate"] = _Model(model, tokenizer, layers, graphs)
    torch.manual_seed(seed + world.dp_rank)
    return LoadedModel(len(layers), tokenizer is not None, layers[0].plan.dispatcher, layers[0].plan.executor)


def generate(
    context: RankContext, prompts: list[list[str | list[int]]], batch_size: int, options: dict[str, Any]
) -> Answers:
    """Continues `prompts[rank]`; `options` are transformers' own. Collective."""
    from eprt.integrations.transformers import generate as continue_prompts

    held: _Model = context.cache["generate"]
    started = time.perf_counter()
    own = [held.ids(prompt) for prompt in prompts[context.rank]]
    tokens = continue_prompts(held.model, own, batch_size=batch_size, graphs=held.graphs, **options)
    seconds = time.perf_counter() - started
    return Answers(tokens, [held.text(new) for new in tokens], seconds)


class _Model:
    """A loaded model and its tokenizer; the rank closes it."""

    def __init__(self, model: Any, tokenizer: Any, layers: list[Any], graphs: bool) -> None:
        self.model, self.tokenizer, self.graphs, self._layers = model, tokenizer, graphs, layers

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
    """Loads the checkpoint's tokenizer from its files alone; None if it has none."""
    if not any((Path(directory) / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)
