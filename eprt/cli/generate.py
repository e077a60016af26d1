"""Runs `eprt generate`: prompts in, tokens out, over several ranks, as JSON lines both ways."""

from __future__ import annotations

import math
import time
from contextlib import closing, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eprt import __version__
from eprt.cli.journal import Journal, as_line
from eprt.cli.prompts import Prompt, read_prompts
from eprt.cli.ranks import Ranks, ranks, world_size
from eprt.cli.run import checkpoint_directory
from eprt.cli.terminal import Terminal, write
from eprt.config import RuntimeConfig
from eprt.errors import CheckpointError, ConfigError, one_block
from eprt.models import family_for
from eprt.models.checkpoint import Checkpoint, hash63
from eprt.models.hf_config import flatten, integer
from eprt.ranks.launcher import RankContext
from eprt.world.groups import joins_torchrun

if TYPE_CHECKING:
    from eprt.cli.arguments import Generate

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_SAMPLES = 512  # tensors whose first bytes tell a model from another of its architecture
_ANY_ID = 2**63 - 1  # of a config without vocab_size


def generate(arguments: Generate, terminal: Terminal) -> int:
    """Continues the prompts. Returns 0."""
    _check(arguments)
    # Graphs hold whole steps, not layers.
    runtime = RuntimeConfig(max_tokens_per_rank=arguments.max_tokens, layer_graphs=False if arguments.graphs else None)
    with checkpoint_directory(arguments.model, terminal.note) as directory:
        # Under torchrun every rank is here, and rank 0 alone reads prompts and journal, and writes answers.
        task = _Task.read(arguments, directory) if terminal.speaks else None
        with nullcontext() if task is None else closing(task):
            if task is not None and task.first:
                terminal.note(f"{task.first} of {len(task.ids)} prompts are answered in the file already")
            if task is not None and task.first == len(task.ids) and not joins_torchrun():
                return 0
            with ranks(arguments.world, arguments.device) as workers:
                ids, first = workers.run(share, value=task and (task.ids, task.first))[0]
                if first < len(ids):
                    _load(arguments, directory, runtime, workers, terminal)
                    _continue(arguments, ids, first, workers, terminal, task)
    return 0


def _check(arguments: Generate) -> None:
    """Raises ConfigError."""
    world_size(arguments.world, arguments.device)
    for name in ("max_new_tokens", "batch"):
        if (value := getattr(arguments, name)) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if not (math.isfinite(arguments.temperature) and arguments.temperature >= 0):
        raise ConfigError(f"--temperature {arguments.temperature}: must be 0 (greedy) or more, and finite")


class _Task:
    """What one process reads before any rank starts, and the way of the answers out.

    Attributes:
        ids: the prompts' token ids.
        first: the first prompt that isn't answered yet.
    """

    def __init__(self, prompts: list[Prompt], ids: list[list[int]], tokenizer: Any, journal: Journal | None) -> None:
        self._prompts, self._tokenizer, self._journal = prompts, tokenizer, journal
        self.ids, self.first = ids, 0 if journal is None else journal.done

    @classmethod
    def read(cls, arguments: Generate, directory: Path) -> _Task:
        """Reads prompts, config, tokenizer and journal. Raises InputError, ConfigError, CheckpointError."""
        prompts = read_prompts(arguments.prompts)
        with Checkpoint(directory) as source:
            family_for(source.config)
            vocabulary = integer(flatten(source.config), "vocab_size", default=_ANY_ID, least=1)
            model = "" if arguments.output is None else _fingerprint(source)
        tokenizer = _tokenizer(directory)
        ids = [prompt.ids(tokenizer, vocabulary) for prompt in prompts]
        if arguments.output is None:
            return cls(prompts, ids, tokenizer, None)
        if arguments.prompts is not None and arguments.output.exists() and arguments.output.samefile(arguments.prompts):
            raise ConfigError(f"--output {arguments.output}: it is the file of the prompts; name another")
        names = ("seed", "max_new_tokens", "temperature")
        settings = {"version": __version__, "model": model} | {name: getattr(arguments, name) for name in names}
        size = arguments.batch * world_size(arguments.world, arguments.device)
        journal = Journal(arguments.output, settings, size, [prompt.given for prompt in prompts])
        return cls(prompts, ids, tokenizer, journal)

    def answer(self, shares: list[range], by_rank: list[Answers]) -> None:
        """Writes a round's answers in the prompts' order; `shares` are each rank's numbers of prompts."""
        lines: dict[int, str] = {}
        for rank, (share, answers) in enumerate(zip(shares, by_rank, strict=True)):
            for number, tokens in zip(share, answers.tokens, strict=True):
                said: dict[str, Any] = {"tokens": tokens, "rank": rank}
                if self._tokenizer is not None:
                    said["text"] = str(self._tokenizer.decode(tokens, skip_special_tokens=True))
                lines[number] = as_line(self._prompts[number].given, said)
        ordered = [line for _, line in sorted(lines.items())]
        if self._journal is not None:
            self._journal.write(ordered)
        else:
            write("\n".join(ordered))

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()


def _load(arguments: Generate, directory: Path, runtime: RuntimeConfig, workers: Ranks, terminal: Terminal) -> None:
    started = time.perf_counter()
    loaded: LoadedModel = workers.run(
        load_model,
        directory=str(directory.resolve()),
        runtime=runtime,
        graphs=arguments.graphs,
        batch=arguments.batch,
        behind_s=workers.timeout_s,
    )[0]
    terminal.note(
        f"{loaded.layers} MoE layers on {workers.size} ranks, ready after {time.perf_counter() - started:.1f} s; "
        f"dispatcher {loaded.dispatcher}, executor {loaded.executor}"
    )


def _continue(
    arguments: Generate, ids: list[list[int]], first: int, workers: Ranks, terminal: Terminal, task: _Task | None
) -> None:
    """Continues the prompts in rounds of `batch` per rank, and writes each round's answers in the prompts' order."""
    options: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens, "do_sample": arguments.temperature > 0}
    options |= {"temperature": arguments.temperature} if options["do_sample"] else {}
    tokens, busy = [0] * workers.size, [0.0] * workers.size
    size = workers.size * arguments.batch
    rounds = [range(start, min(start + size, len(ids))) for start in range(first, len(ids), size)]
    with terminal.progress("rounds", len(rounds)) as advance:
        for numbers in rounds:
            shares = [numbers[rank :: workers.size] for rank in range(workers.size)]
            given = [[ids[number] for number in share] for share in shares]
            # A seed for each round and rank: what a restart samples doesn't depend on what was sampled before it.
            seeds = [hash63(f"{arguments.seed} {numbers.start} {rank}".encode()) for rank in range(workers.size)]
            answers: list[Answers] = workers.run(continue_share, prompts=given, seeds=seeds, options=options)
            for rank, answer in enumerate(answers):
                tokens[rank] += sum(map(len, answer.tokens))
                busy[rank] += answer.seconds
            if task is not None:
                task.answer(shares, answers)
            advance(f"{numbers.stop} of {len(ids)} prompts done, {sum(tokens)} tokens")
    rates = [count / seconds if seconds else 0.0 for count, seconds in zip(tokens, busy, strict=True)]
    each = f"tokens/s by rank: {', '.join(f'{rate:,.1f}' for rate in rates)}; together {sum(rates):,.1f}"
    terminal.note(f"{sum(tokens)} tokens for {len(ids) - first} prompts; {each}")


def _fingerprint(source: Checkpoint) -> str:
    """Returns a hash of config, tensors and tokenizer; of the weights it reads samples."""
    names = sorted(source.manifest)
    found = sha256(str(source.fingerprint).encode())
    for name in names[:: max(1, len(names) // _SAMPLES)]:
        found.update(source.sample(name))
    for name in ("generation_config.json", *_TOKENIZER):
        path = source.directory / name
        found.update(path.read_bytes() if path.is_file() else b"")
    return found.hexdigest()[:16]


def _tokenizer(directory: Path) -> Any:
    """Loads the checkpoint's tokenizer from its files alone; None if it has none. Raises CheckpointError."""
    if not any((directory / name).exists() for name in _TOKENIZER):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
    except Exception as error:
        why = one_block(" ".join(f"{type(error).__name__}: {error}".split()), 500)
        raise CheckpointError(f"{directory}: its tokenizer can't be loaded: {why}") from error


# ---- the jobs of each rank: it loads the model without other ranks' experts, and continues its prompts ------------


@dataclass(frozen=True)
class LoadedModel:
    """The number of MoE layers, and the plan's choice."""

    layers: int
    dispatcher: str
    executor: str


@dataclass(frozen=True)
class Answers:
    """One rank's answers of a round: the new tokens of each prompt, and the seconds they took."""

    tokens: list[list[int]]
    seconds: float


def share(context: RankContext, value: Any) -> Any:
    """Returns what this rank has read; the caller takes rank 0's."""
    return value


def load_model(
    context: RankContext, directory: str, runtime: RuntimeConfig, graphs: bool, batch: int, behind_s: float
) -> LoadedModel:
    """Loads the model without other ranks' experts. Collective."""
    from eprt.integrations.transformers import load_without_experts, parallelize

    world = context.world(timeout_s=behind_s)
    context.release("generate")
    model = load_without_experts(directory, dtype="auto", device_map=None).eval().to(world.device)
    layers = parallelize(model, world, runtime)
    world.warmup(*layers)
    context.cache["generate"] = _Model(model, layers, graphs, batch)
    return LoadedModel(len(layers), layers[0].plan.dispatcher, layers[0].plan.executor)


def continue_share(
    context: RankContext, prompts: list[list[list[int]]], seeds: list[int], options: dict[str, Any]
) -> Answers:
    """Continues `prompts[rank]`; `options` are transformers' own. Collective."""
    from eprt.integrations.transformers import generate

    held: _Model = context.cache["generate"]
    torch.manual_seed(seeds[context.rank])
    started = time.perf_counter()
    tokens = generate(held.model, prompts[context.rank], batch_size=held.batch, graphs=held.graphs, **options)
    return Answers(tokens, time.perf_counter() - started)


@dataclass
class _Model:
    """A loaded model; the rank closes it."""

    model: Any
    layers: list[Any]
    graphs: bool
    batch: int

    def close(self) -> None:
        for layer in self.layers:
            layer.close()
