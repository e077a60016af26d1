"""Runs `eprt generate`: prompts in, tokens out, over several ranks, as JSON lines both ways."""

from __future__ import annotations

import logging
import time
from contextlib import closing, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

from eprt import __version__
from eprt.cli.arguments import Generate
from eprt.cli.generate_jobs import (
    TOKENIZER_FILES,
    Answers,
    LoadedModel,
    Settings,
    continue_share,
    heard,
    load_model,
    load_tokenizer,
    share,
)
from eprt.cli.journal import Journal, as_line
from eprt.cli.prompts import Prompt, read_prompts
from eprt.cli.ranks import Ranks, ranks, world_size
from eprt.cli.run import checkpoint_directory
from eprt.cli.sampling import checkpoints_generation, generation_options, given_flags
from eprt.cli.terminal import Terminal, write
from eprt.config import RuntimeConfig
from eprt.errors import ConfigError
from eprt.models import family_for, has_family
from eprt.models.checkpoint import Checkpoint, hash63
from eprt.models.hf_config import flatten, integer
from eprt.world.groups import joins_torchrun

logger = logging.getLogger("eprt")
_SAMPLES = 512  # tensors whose first bytes tell a model from another of its architecture
_ANY_ID = 2**63 - 1  # of a config without vocab_size


def generate(arguments: Generate, terminal: Terminal) -> int:
    """Continues the prompts. Returns 0."""
    _check(arguments)
    model = None if arguments.model is None else _found(arguments.model)
    with heard() as said, checkpoint_directory(model, terminal.note) as directory:
        # Under torchrun every rank is here, and rank 0 alone reads prompts and journal, and writes answers.
        task = _Task.read(arguments, directory) if terminal.speaks else None
        with nullcontext() if task is None else closing(task):
            if task is not None and task.work.first:
                terminal.note(f"{task.work.first} of {len(task.work.ids)} prompts are answered in the file already")
            if task is not None and not task.work.ids:
                terminal.note(f"{arguments.prompts} holds no prompt")
            if task is not None and task.work.first == len(task.work.ids) and not joins_torchrun():
                return 0
            with ranks(arguments.world, arguments.device) as workers:
                work: _Work = workers.run(share, value=task and task.work)[0]
                if work.first < len(work.ids):
                    _Run(arguments, work, workers, terminal, task, said).run(directory)
    return 0


def _check(arguments: Generate) -> None:
    """Raises ConfigError."""
    world_size(arguments.world, arguments.device)
    RuntimeConfig(max_tokens_per_rank=arguments.max_tokens)
    if arguments.batch < 1:
        raise ConfigError(f"--batch {arguments.batch}: must be at least 1")
    if arguments.graphs and arguments.no_graphs:
        raise ConfigError("--graphs and --no-graphs: choose one")
    given_flags(arguments)


def _check_stops(strings: list[str], tokenizer: Any) -> None:
    """Raises ConfigError."""
    from eprt.integrations.transformers.sequences import stops_at

    if tokenizer is None:
        raise ConfigError(f"stop strings {strings}: the checkpoint has no tokenizer to tell text by; add its files")
    stops_at(strings, tokenizer)


def _found(model: Path) -> Path:
    """Returns the directory of a checkpoint or hub id. Raises CheckpointError."""
    from eprt.integrations.transformers.load import find_checkpoint

    return find_checkpoint(model)


@dataclass(frozen=True)
class _Work:
    """Tells all ranks what they have to know.

    Attributes:
        ids: the prompts' token ids.
        seeds: one for each prompt; None where nothing is sampled.
        first: the first prompt that isn't answered yet.
        most_new: new tokens of a prompt, at most.
        options: transformers' own; streams, stops: as in `Settings`.
    """

    ids: list[list[int]]
    seeds: list[int] | None
    first: int
    most_new: int
    options: dict[str, Any]
    streams: bool
    stops: bool


class _Task:
    """Holds what one process reads before any rank starts, and writes the answers."""

    def __init__(self, prompts: list[Prompt], tokenizer: Any, journal: Journal | None, work: _Work) -> None:
        self.work = work
        self._prompts, self._tokenizer, self._journal = prompts, tokenizer, journal

    @classmethod
    def read(cls, arguments: Generate, directory: Path) -> _Task:
        """Reads prompts, config, tokenizer and journal. Raises InputError, ConfigError, CheckpointError."""
        prompts = read_prompts(arguments.prompts)
        with Checkpoint(directory) as source:
            _require_model(source.config)
            vocabulary = integer(flatten(source.config), "vocab_size", default=_ANY_ID, least=1)
            model = "" if arguments.output is None else _fingerprint(source)
        tokenizer = load_tokenizer(directory)
        ids = [prompt.ids(tokenizer, vocabulary) for prompt in prompts]
        config = checkpoints_generation(directory)
        options = generation_options(arguments, config)
        all_options = {**config.to_dict(), **options}
        if stops := all_options.get("stop_strings"):
            _check_stops(stops, tokenizer)
        seeds = [
            hash63(f"{arguments.seed} {number}".encode()) if prompt.seed is None else prompt.seed
            for number, prompt in enumerate(prompts)
        ]
        most_new = all_options.get("max_new_tokens") or max(
            1, all_options["max_length"] - min(map(len, ids), default=0)
        )
        beams = all_options.get("num_beams") or 1
        journal = _journal(arguments, model, prompts)
        work = _Work(
            ids,
            seeds if all_options.get("do_sample") else None,
            0 if journal is None else journal.done,
            most_new,
            options,
            streams=beams == 1,
            stops=bool(stops),
        )
        return cls(prompts, tokenizer, journal, work)

    def answer(self, shares: list[range], by_rank: list[Answers]) -> None:
        """Writes a round's answers in the prompts' order; `shares` are each rank's numbers of prompts."""
        lines: dict[int, str] = {}
        for rank, (numbers, answers) in enumerate(zip(shares, by_rank, strict=True)):
            for number, tokens in zip(numbers, answers.tokens, strict=True):
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


def _journal(arguments: Generate, model: str, prompts: list[Prompt]) -> Journal | None:
    """Opens the file of answers, if one is asked for. Raises ConfigError."""
    if arguments.output is None:
        return None
    if arguments.prompts is not None and arguments.output.exists() and arguments.output.samefile(arguments.prompts):
        raise ConfigError(f"--output {arguments.output}: it is the file of the prompts; name another")
    settings = {"version": __version__, "model": model, "seed": arguments.seed, **given_flags(arguments)}
    size = arguments.batch * world_size(arguments.world, arguments.device)
    return Journal(arguments.output, settings, size, [prompt.given for prompt in prompts])


def _fingerprint(source: Checkpoint) -> str:
    """Returns a hash of config, tensors and tokenizer; of the weights it reads samples."""
    names = sorted(source.manifest)
    found = sha256(str(source.fingerprint).encode())
    for name in names[:: max(1, len(names) // _SAMPLES)]:
        found.update(source.sample(name))
    for name in ("generation_config.json", "chat_template.jinja", *TOKENIZER_FILES):
        path = source.directory / name
        found.update(path.read_bytes() if path.is_file() else b"")
    return found.hexdigest()[:16]


class _Run:
    """Loads the model on the ranks and continues what is left of the prompts.

    Args:
        said: warnings that this process has shown; those of the ranks are shown once.
    """

    def __init__(
        self,
        arguments: Generate,
        work: _Work,
        workers: Ranks,
        terminal: Terminal,
        task: _Task | None,
        said: list[str],
    ) -> None:
        self._arguments, self._work, self._workers = arguments, work, workers
        self._terminal, self._task, self._said = terminal, task, said

    def run(self, directory: Path) -> None:
        self._load(directory)
        started = time.perf_counter()
        answers = self._continue()
        self._report(answers, time.perf_counter() - started)

    def _load(self, directory: Path) -> None:
        arguments, workers, started = self._arguments, self._workers, time.perf_counter()
        settings = Settings(
            str(directory.resolve()),
            RuntimeConfig(max_tokens_per_rank=arguments.max_tokens),
            arguments.graphs or (workers.device == "cuda" and not arguments.no_graphs),
            arguments.batch,
            self._work.options,
            self._work.streams,
            self._work.stops,
        )
        with Checkpoint(directory) as source:
            layers = _count_layers(source.config)
        with self._terminal.progress("layers", layers) as progress:
            found: list[LoadedModel] = workers.run(
                load_model, settings=settings, behind_s=workers.timeout_s, ticks=progress.ticks
            )
        self._relay([model.warnings for model in found])
        self._terminal.note(
            f"{found[0].layers} MoE layers on {workers.size} ranks, ready after {time.perf_counter() - started:.1f} s; "
            f"dispatcher {found[0].dispatcher}, executor {found[0].executor}"
        )

    def _continue(self) -> list[list[Answers]]:
        """Continues the prompts in rounds of `batch` per rank, and writes each round's answers in the prompts' order.
        Returns the answers of each round, by rank."""
        work, ranks_, found = self._work, self._workers.size, list[list[Answers]]()
        size = ranks_ * self._arguments.batch
        rounds = [range(start, min(start + size, len(work.ids))) for start in range(work.first, len(work.ids), size)]
        with self._terminal.progress("rounds", len(rounds), size * work.most_new) as progress:
            for numbers in rounds:
                shares = [numbers[rank::ranks_] for rank in range(ranks_)]
                answers: list[Answers] = self._workers.run(
                    continue_share,
                    prompts=[[work.ids[number] for number in share] for share in shares],
                    seeds=work.seeds and [[work.seeds[number] for number in share] for share in shares],
                    ticks=progress.ticks,
                )
                found.append(answers)
                self._relay([answer.warnings for answer in answers])
                if self._task is not None:
                    self._task.answer(shares, answers)
                tokens = sum(len(row) for each in found for answer in each for row in answer.tokens)
                progress(f"{numbers.stop} of {len(work.ids)} prompts done, {tokens} tokens")
        return found

    def _report(self, found: list[list[Answers]], seconds: float) -> None:
        """Says how fast it went."""
        by_rank = [sum(len(row) for answer in rank for row in answer.tokens) for rank in zip(*found, strict=True)]
        busy = [sum(answer.seconds for answer in rank) for rank in zip(*found, strict=True)]
        rates = ", ".join(f"{count / each:,.1f}" if each else "0" for count, each in zip(by_rank, busy, strict=True))
        prompts, tokens = len(self._work.ids) - self._work.first, sum(by_rank)
        self._terminal.note(
            f"{tokens} tokens for {prompts} prompts in {seconds:.1f} s: {tokens / seconds:,.1f} tokens/s; tokens/s by "
            f"rank: {rates}"
        )
        first = [each for answers in found for answer in answers for each in answer.first_s]
        if first:
            self._terminal.note(
                f"time to first token, from the start of a prompt's round: median {median(first):.3f} s, at most "
                f"{max(first):.3f} s"
            )

    def _relay(self, by_rank: list[list[str]]) -> None:
        """Shows warnings of ranks that have no terminal; torchrun's have shown their own."""
        for text in dict.fromkeys(text for texts in by_rank for text in texts):
            if not joins_torchrun() and text not in self._said:
                logger.warning("%s", text)


def _require_model(config: dict[str, Any]) -> None:
    """Raises ConfigError unless eprt reads the family, or transformers has it."""
    if not has_family(config):
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        if config.get("model_type") not in CONFIG_MAPPING_NAMES:
            family_for(config)


def _count_layers(config: dict[str, Any]) -> int:
    """Returns how many layers with experts are to be loaded, all layers where only transformers knows."""
    if has_family(config):
        return len(family_for(config).moe_layers(config))
    return integer(flatten(config), "num_hidden_layers", default=1, least=1)
