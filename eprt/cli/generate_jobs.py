"""The jobs of each rank of `eprt generate`: it loads the model without other ranks' experts, and continues prompts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eprt.config import RuntimeConfig
from eprt.errors import CheckpointError, one_block
from eprt.ranks.launcher import RankContext

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Answers:
    """One rank's answers of a round.

    Attributes:
        tokens: the new tokens of each prompt.
        seconds: how long all took.
        first_s: seconds from the round's start to the first token of each prompt, in no order.
        warnings: what was warned of.
    """

    tokens: list[list[int]]
    seconds: float
    first_s: list[float]
    warnings: list[str]


@dataclass(frozen=True)
class Settings:
    """How all ranks load and continue.

    Attributes:
        max_tokens: that a rank's buffers are sized for.
        batch: prompts that a rank continues at once.
        options: transformers' own.
        streams: whether tokens can be seen as they are chosen: not with beams.
        stops: whether text ends sequences, for which ranks need the tokenizer.
    """

    max_tokens: int
    batch: int
    options: dict[str, Any]
    streams: bool
    stops: bool


@dataclass(frozen=True)
class Work:
    """Tells all ranks what they have to know.

    Attributes:
        ids, seeds: token ids, and a seed, of each prompt; no seeds where nothing is sampled.
        first: the first prompt that isn't answered yet.
        most_new: new tokens of a prompt, at most.
    """

    ids: list[list[int]]
    seeds: list[int] | None
    first: int
    most_new: int
    settings: Settings


def share(context: RankContext, value: Any) -> Any:
    """Returns what this rank has read; the caller takes rank 0's."""
    return value


def load_model(
    context: RankContext, directory: str, settings: Settings, graphs: bool, behind_s: float, ticks: Path | None
) -> tuple[int, str, str, list[str]]:
    """Loads the model without other ranks' experts; appends a byte to `ticks` for each layer. Collective.

    `graphs`: decode steps are replayed from CUDA graphs where they can be captured. Returns the number of MoE layers,
    the plan's dispatcher and executor, and what was warned of.
    """
    from transformers.utils.logging import disable_progress_bar

    from eprt.integrations.transformers import load_without_experts, parallelize
    from eprt.integrations.transformers.decode import model_refusal

    disable_progress_bar()  # one for each rank, terminal or not; the command has its own
    world = context.world(timeout_s=behind_s)
    context.release("generate")
    with heard() as warnings:
        model = load_without_experts(directory, dtype="auto", device_map=None).eval().to(world.device)
        whole = graphs and not model_refusal(model, settings.options)  # graphs hold whole steps, not layers
        runtime = RuntimeConfig(max_tokens_per_rank=settings.max_tokens, layer_graphs=False if whole else None)
        layers = parallelize(model, world, runtime, on_layer=_ticker(ticks if context.rank == 0 else None))
        world.warmup(*layers)
    tokenizer = load_tokenizer(Path(directory)) if settings.stops else None
    context.cache["generate"] = _Model(model, layers, settings, graphs, tokenizer)
    return len(layers), layers[0].plan.dispatcher, layers[0].plan.executor, warnings


def continue_share(
    context: RankContext, prompts: list[list[list[int]]], seeds: list[list[int]] | None, ticks: Path | None
) -> Answers:
    """Continues `prompts[rank]`; appends a byte to `ticks` for each new token. Collective."""
    from eprt.integrations.transformers import generate

    held: _Model = context.cache["generate"]
    first: dict[int, float] = {}
    tick, started = _ticker(ticks), time.perf_counter()

    def note(prompt: int, _: int) -> None:
        first.setdefault(prompt, time.perf_counter() - started)
        tick()

    more: dict[str, Any] = dict(held.settings.options)
    more |= {"on_token": note} if held.settings.streams else {}
    more |= {"tokenizer": held.tokenizer} if held.tokenizer is not None else {}
    more |= {"seeds": seeds[context.rank]} if seeds is not None else {}
    with heard() as warnings:
        tokens = generate(held.model, prompts[context.rank], batch_size=held.settings.batch, graphs=held.graphs, **more)
    return Answers(tokens, time.perf_counter() - started, list(first.values()), warnings)


@dataclass
class _Model:
    """A loaded model; the rank closes it."""

    model: Any
    layers: list[Any] = field(repr=False)
    settings: Settings
    graphs: bool
    tokenizer: Any

    def close(self) -> None:
        for layer in self.layers:
            layer.close()


def _ticker(path: Path | None) -> Callable[..., None]:
    """Returns a function that appends a byte to a file at each call, if there is one."""
    file = None if path is None else path.open("ab", buffering=0)

    def tick(*_: int) -> None:
        if file is not None:
            file.write(b".")

    return tick


def load_tokenizer(directory: Path) -> Any:
    """Loads the checkpoint's tokenizer from its files alone; None if it has none. Raises CheckpointError."""
    if not any((directory / name).exists() for name in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
    except Exception as error:
        why = one_block(" ".join(f"{type(error).__name__}: {error}".split()), 500)
        if "trust_remote_code" in why:
            why += "; eprt generate runs no code of a checkpoint: tokenize by yourself, and call `generate` from Python"
        raise CheckpointError(f"{directory}: its tokenizer can't be loaded: {why}") from error


@contextmanager
def heard() -> Iterator[list[str]]:
    """Yields a list that grows by eprt's warnings inside the block: started ranks have no terminal of their own."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())
    logger = logging.getLogger("eprt")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
