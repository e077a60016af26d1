"""What each rank runs for test_families.py: a tiny model of a folder of transformers, alone and over the ranks."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from eprt.cli.generate_jobs import heard
from eprt.config import RuntimeConfig
from eprt.integrations.transformers import generate, load_without_experts, lockstep, parallelize
from eprt.ranks.launcher import RankContext
from support.builders import BEHIND_S
from support.cases import tiny_families
from support.jobs import generation_jobs

RUNTIME = RuntimeConfig(executor="torch_grouped", max_tokens_per_rank=64)
OPTIONS = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
_NO_GRAPHS, _ALIKE = "generate(graphs=...) runs without graphs: its cache has", "batches hold prompts of equal length"


@dataclass(frozen=True)
class Outcome:
    """One rank's: tokens after its prompts by eprt and by transformers alone, numbers of the layers, or an error;
    `told`: what was warned of, but for caches and batches of other kinds of attention."""

    found: list[list[int]]
    expected: list[list[int]]
    layers: tuple[int, ...] = ()
    error: str = ""
    told: tuple[str, ...] = ()


def continue_families(
    context: RankContext, names: list[str], folder: str, prompts: list[list[list[int]]]
) -> dict[str, Outcome]:
    """Each folder of transformers in turn: rank r continues `prompts[r]`, of two ranks with step graphs. Checkpoints
    lie in `folder`, by name; of `name:text` the text model alone is loaded."""
    world = context.world(timeout_s=BEHIND_S)
    found: dict[str, Outcome] = {}
    for name in names:
        try:
            found[name] = _continue(name, folder, prompts[context.rank], world)
        except Exception as error:  # noqa: BLE001  the other families go on
            places = [f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
            found[name] = Outcome([], [], error=f"{type(error).__name__}: {error} ({', '.join(places[-3:])})")
    return found


def _continue(name: str, folder: str, prompts: list[list[int]], world: Any) -> Outcome:
    name, _, text = name.partition(":")
    whole_model = not text and name not in tiny_families.borrowed()  # else an auto class knows what runs it
    kind, folder = tiny_families.model_class(name) if whole_model else None, f"{folder}/{name}"
    with _together():
        whole = (kind or AutoModelForCausalLM).from_pretrained(folder, dtype=torch.float32).eval()
        expected = [alone(whole, prompt) for prompt in prompts]
        model = load_without_experts(folder, dtype=torch.float32, model_class=kind).eval()
    layers = parallelize(model, world, RUNTIME)
    try:
        with heard() as said:
            if hasattr(model, "generate"):
                found = generate(model, prompts, graphs=world.size == 2, **OPTIONS)
            else:
                with torch.no_grad(), lockstep(model):
                    found = [alone(model, prompt) for prompt in prompts]
    finally:
        for layer in layers:
            layer.close()
        world.buckets = ()  # this World serves other models
    told = tuple(text for text in said if not text.startswith((_NO_GRAPHS, _ALIKE)))
    return Outcome(found, expected, tuple(layer.dispatcher.layer for layer in layers), told=told)


def alone(model: Any, prompt: list[int]) -> list[int]:
    if not hasattr(model, "generate"):
        return model(torch.tensor([prompt])).logits[0].argmax(dim=-1).tolist()
    return generation_jobs.alone(model, prompt, **OPTIONS)


@contextmanager
def _together() -> Iterator[None]:
    """Lets every rank raise the error of one, so that none waits for it in vain."""
    error = None
    try:
        yield
    except Exception as raised:  # noqa: BLE001  raised below
        error = raised
    said: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(said, repr(error) if error else "")
    if error is not None:
        raise error
    if any(said):
        raise RuntimeError(f"on another rank: {next(filter(None, said))}")
