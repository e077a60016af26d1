"""Runs `eprt generate`: prompts in, tokens out, over several ranks, as JSON lines both ways."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from eprt import __version__
from eprt.cli.arguments import Generate, Generation
from eprt.cli.generate_jobs import (
    TOKENIZER_FILES,
    Answers,
    Settings,
    Work,
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
from eprt.cli.terminal import Terminal, counted, write
from eprt.config import MAX_TOKENS, require_size
from eprt.errors import CheckpointError, ConfigError, InputError, one_block
from eprt.json_files import shown
from eprt.models import family_for, has_family
from eprt.models.checkpoint import Checkpoint, hash63, read_config
from eprt.models.hf_config import HfConfig, boolean, flatten, integer, real
from eprt.support import Requirement
from eprt.world.groups import joins_torchrun

if TYPE_CHECKING:
    from transformers import GenerationConfig

logger = logging.getLogger("eprt")
TRANSFORMERS = Requirement("transformers", ("transformers",), "5.17")  # of pyproject.toml
_SAMPLES = 512  # tensors whose first bytes tell a model from another of its architecture
_ANY_ID = 2**63 - 1  # of a config without vocab_size
_NEW_TOKENS = 32  # where neither a flag nor the checkpoint says it
_LIMITS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (lambda value: value >= 1, "at least 1"),
    # The bounds of scores that are divided: below, float32 overflows.
    "temperature": (lambda value: value == 0 or value >= 0.001, "0 (greedy) or at least 0.001, and finite"),
    "top_p": (lambda value: 0 < value <= 1, "above 0, at most 1 (all tokens)"),
    "top_k": (lambda value: value >= 0, "at least 0 (all tokens)"),
    "min_p": (lambda value: 0 <= value <= 1, "0 to 1"),
    "repetition_penalty": (lambda value: 0.01 <= value <= 100, "0.01 to 100 (1 is none)"),
    "stop_strings": (all, "text"),
}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")  # each of them asks for sampling
# Numbers of generation_config.json that transformers reads while ranks run.
_REALS = (
    "temperature", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty",
    "encoder_repetition_penalty", "length_penalty", "guidance_scale", "max_time",
)  # fmt: skip
_INTEGERS = (
    "top_k", "num_beams", "num_return_sequences", "max_length", "min_length", "min_new_tokens", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
)  # fmt: skip
_TOKEN_IDS = ("forced_bos_token_id", "forced_eos_token_id", "bad_words_ids")


def generate(arguments: Generate, terminal: Terminal) -> int:
    _check(arguments)
    model = arguments.model
    if model is not None:
        from eprt.integrations.transformers.load import find_checkpoint

        model = find_checkpoint(model)
    with heard() as said, checkpoint_directory(model, terminal.note) as directory:
        # Under torchrun every rank is here, and rank 0 alone reads prompts and journal, and writes answers.
        task = _Task.read(arguments, directory) if terminal.speaks else None
        with nullcontext() if task is None else closing(task):
            if task is not None and task.work.first:
                held = f"{task.work.first} of {counted(len(task.work.ids), 'prompt')}"
                terminal.note(f"{held} answered in the file already")
            if task is not None and not task.work.ids:
                terminal.note(f"{arguments.prompts} holds no prompt")
            if task is not None and task.work.first == len(task.work.ids) and not joins_torchrun():
                return 0
            with ranks(arguments.world, arguments.device) as workers:
                work: Work = workers.run(share, value=task and task.work)[0]
                if work.first < len(work.ids):
                    _Run(arguments, work, workers, terminal, task, said).run(directory)
    return 0


def _check(arguments: Generate) -> None:
    if not (installed := TRANSFORMERS.check()):
        raise ConfigError(f"eprt generate runs transformers' models: {installed.reason}")
    world_size(arguments.world, arguments.device)
    require_size("--max-tokens", arguments.max_tokens, MAX_TOKENS)
    if arguments.batch < 1:
        raise ConfigError(f"--batch {arguments.batch}: must be at least 1")
    if arguments.graphs and arguments.no_graphs:
        raise ConfigError("--graphs and --no-graphs: choose one")
    _given_flags(arguments)


@dataclass(frozen=True)
class _Task:
    """Holds what one process reads before any rank starts, and writes the answers."""

    prompts: list[Prompt]
    tokenizer: Any
    journal: Journal | None
    work: Work

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
        config = _checkpoints_generation(directory, vocabulary)
        options = _generation_options(arguments, config)
        all_options = {**config.to_dict(), **options}
        if stops := all_options.get("stop_strings"):
            _check_stops(stops, tokenizer)
        seeds = [
            hash63(f"{arguments.seed} {number}".encode()) if prompt.seed is None else prompt.seed
            for number, prompt in enumerate(prompts)
        ]
        longest = all_options.get("max_new_tokens") or max(1, all_options["max_length"] - min(map(len, ids), default=0))
        _check_limits(all_options, prompts, ids)
        streams = (all_options.get("num_beams") or 1) == 1
        settings = Settings(arguments.max_tokens, arguments.batch, options, streams, bool(stops))
        journal = _journal(arguments, model, prompts)
        first, seeds = 0 if journal is None else journal.done, seeds if all_options.get("do_sample") else None
        return cls(prompts, tokenizer, journal, Work(ids, seeds, first, longest, settings))

    def answer(self, shares: list[range], by_rank: list[Answers]) -> None:
        """Writes a round's answers in the prompts' order; `shares` are each rank's numbers of prompts."""
        lines: dict[int, str] = {}
        for rank, (numbers, answers) in enumerate(zip(shares, by_rank, strict=True)):
            for number, tokens in zip(numbers, answers.tokens, strict=True):
                said: dict[str, Any] = {"tokens": tokens, "rank": rank}
                if self.tokenizer is not None:
                    said["text"] = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
                lines[number] = as_line(self.prompts[number].given, said)
        ordered = [line for _, line in sorted(lines.items())]
        if self.journal is not None:
            self.journal.write(ordered)
        else:
            write("\n".join(ordered))

    def close(self) -> None:
        if self.journal is not None:
            self.journal.close()


def _require_model(config: dict[str, Any]) -> None:
    """Raises ConfigError unless eprt reads the family, or transformers has it."""
    if not has_family(config):
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        if config.get("model_type") not in tuple(CONFIG_MAPPING_NAMES):  # it needn't be a name that can be hashed
            family_for(config)


def _check_stops(strings: list[str], tokenizer: Any) -> None:
    from eprt.integrations.transformers.sequences import stops_at

    if tokenizer is None:
        raise ConfigError(f"stop strings {strings}: the checkpoint has no tokenizer to tell text by; add its files")
    stops_at(strings, tokenizer)


def _check_limits(options: dict[str, Any], prompts: list[Prompt], ids: list[list[int]]) -> None:
    """Raises ConfigError, InputError where generation_config.json doesn't go with the flags, or with a prompt."""
    if options.get("do_sample") and (beams := options.get("num_beams") or 1) > 1:
        raise ConfigError(
            f"generation_config.json says num_beams {beams}, whose samples no --seed decides: set it to 1 there, or "
            "give --temperature 0"
        )
    most = None if options.get("max_new_tokens") else options["max_length"]
    for prompt, tokens in zip(prompts, ids, strict=True):
        if most is not None and len(tokens) >= most:
            raise InputError(
                f"{prompt.where}: {len(tokens)} tokens, and generation_config.json's max_length is {most}, prompt "
                "included: give --max-new-tokens"
            )


def _journal(arguments: Generate, model: str, prompts: list[Prompt]) -> Journal | None:
    if arguments.output is None:
        return None
    if arguments.prompts is not None and arguments.output.exists() and arguments.output.samefile(arguments.prompts):
        raise ConfigError(f"--output {arguments.output}: it is the file of the prompts; name another")
    settings = {"version": __version__, "model": model, "seed": arguments.seed, **_given_flags(arguments)}
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


@dataclass(frozen=True)
class _Run:
    """Loads the model on the ranks and continues what is left of the prompts.

    Attributes:
        said: warnings that this process has shown; those of the ranks are shown once.
    """

    arguments: Generate
    work: Work
    workers: Ranks
    terminal: Terminal
    task: _Task | None
    said: list[str]

    def run(self, directory: Path) -> None:
        self._load(directory)
        started = time.perf_counter()
        answers = self._continue()
        self._report(answers, time.perf_counter() - started)

    def _load(self, directory: Path) -> None:
        arguments, workers, started = self.arguments, self.workers, time.perf_counter()
        config = read_config(directory)
        if has_family(config):
            count = len(family_for(config).moe_layers(config))
        else:  # only transformers knows which of them have experts
            count = integer(flatten(config), "num_hidden_layers", default=1, least=1)
        with self.terminal.progress("layers", count) as progress:
            found = workers.run(
                load_model,
                directory=str(directory.resolve()),
                settings=self.work.settings,
                graphs=arguments.graphs or (workers.device == "cuda" and not arguments.no_graphs),
                behind_s=workers.timeout_s,
                ticks=progress.ticks,
            )
        self._relay([warnings for *_, warnings in found])
        layers, dispatcher, executor, _ = found[0]
        self.terminal.note(
            f"{counted(layers, 'MoE layer')} on {counted(workers.size, 'rank')}, ready after "
            f"{time.perf_counter() - started:.1f} s; dispatcher {dispatcher}, executor {executor}"
        )

    def _continue(self) -> list[list[Answers]]:
        """Continues the prompts in rounds of `batch` per rank, and writes each round's answers in the prompts' order.
        Returns the answers of each round, by rank."""
        work, ranks_, found = self.work, self.workers.size, list[list[Answers]]()
        size = ranks_ * self.arguments.batch
        rounds = [range(start, min(start + size, len(work.ids))) for start in range(work.first, len(work.ids), size)]
        with self.terminal.progress("rounds", len(rounds), size * work.most_new) as progress:
            for numbers in rounds:
                shares = [numbers[rank::ranks_] for rank in range(ranks_)]
                answers: list[Answers] = self.workers.run(
                    continue_share,
                    prompts=[[work.ids[number] for number in share] for share in shares],
                    seeds=work.seeds and [[work.seeds[number] for number in share] for share in shares],
                    ticks=progress.ticks,
                )
                found.append(answers)
                self._relay([answer.warnings for answer in answers])
                if self.task is not None:
                    self.task.answer(shares, answers)
                tokens = sum(len(row) for each in found for answer in each for row in answer.tokens)
                done = f"{numbers.stop} of {counted(len(work.ids), 'prompt')} done"
                progress(f"{done}, {counted(tokens, 'token')}")
        return found

    def _report(self, found: list[list[Answers]], seconds: float) -> None:
        by_rank = [sum(len(row) for answer in rank for row in answer.tokens) for rank in zip(*found, strict=True)]
        busy = [sum(answer.seconds for answer in rank) for rank in zip(*found, strict=True)]
        rates = ", ".join(f"{count / each:,.1f}" if each else "0" for count, each in zip(by_rank, busy, strict=True))
        prompts, tokens = len(self.work.ids) - self.work.first, sum(by_rank)
        self.terminal.note(
            f"{counted(tokens, 'token')} for {counted(prompts, 'prompt')} in {seconds:.1f} s: "
            f"{tokens / seconds:,.1f} tokens/s; tokens/s by rank: {rates}"
        )
        if first := [each for answers in found for answer in answers for each in answer.first_s]:
            self.terminal.note(
                f"time to first token, from the start of a prompt's round: median {median(first):.3f} s, at most "
                f"{max(first):.3f} s"
            )

    def _relay(self, by_rank: list[list[str]]) -> None:
        """Shows warnings of ranks that have no terminal; torchrun's have shown their own."""
        for text in dict.fromkeys(text for texts in by_rank for text in texts):
            if not joins_torchrun() and text not in self.said:
                logger.warning("%s", text)


# ---- flags as options of transformers, beside the checkpoint's own generation config -----------------------------


def _given_flags(arguments: Generation) -> dict[str, Any]:
    """Returns all flags by their names, None where one isn't given, as JSON has them. Raises ConfigError."""
    found: dict[str, Any] = {field.name: getattr(arguments, field.name) for field in fields(Generation)}
    found = {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
    for name, (allowed, said) in _LIMITS.items():
        value = found[name]
        if value is not None and not ((not isinstance(value, float) or math.isfinite(value)) and allowed(value)):
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be {said}")
    return found


def _generation_options(arguments: Generation, config: GenerationConfig) -> dict[str, Any]:
    """Returns the options that differ from the checkpoint's `config`, for `model.generate`. Raises ConfigError."""
    options = {name: value for name, value in _given_flags(arguments).items() if value not in (None, [])}
    if options.get("temperature", config.temperature) == 0:
        options = {name: value for name, value in options.items() if name not in _SAMPLING} | {"do_sample": False}
    elif any(name in options for name in _SAMPLING):
        options["do_sample"] = True
    if config.max_new_tokens is None and config.max_length is None:
        options.setdefault("max_new_tokens", _NEW_TOKENS)
    return options


def _checkpoints_generation(directory: Path, vocabulary: int) -> GenerationConfig:
    """Returns what a checkpoint's generation_config.json says; transformers' defaults without one. Raises
    CheckpointError, ConfigError."""
    from transformers import GenerationConfig

    path = directory / "generation_config.json"
    if not path.is_file():
        return GenerationConfig()
    try:
        config = GenerationConfig.from_pretrained(str(directory))
    except Exception as error:
        why = one_block(" ".join(f"{type(error).__name__}: {error}".split()), 300)
        raise CheckpointError(f"{path}: can't be read: {why}") from error
    _check_numbers(HfConfig(config.to_dict(), str(path)), vocabulary)
    return config


def _check_numbers(said: HfConfig, vocabulary: int) -> None:
    """Raises ConfigError where generation_config.json has what transformers would refuse on the ranks."""
    for name in _REALS:
        real(said, name, default=1.0)
    for name in _INTEGERS:
        integer(said, name, default=0, least=-1)
    for name in ("repetition_penalty", *(_SAMPLING if boolean(said, "do_sample", False) else ())):
        value, (allowed, words) = said.get(name), _LIMITS[name]
        if value is not None and not allowed(value):
            raise ConfigError(f"{said.where}: {name} is {value}: must be {words}")
    for name in _TOKEN_IDS:
        for token in _inside(said.get(name)):
            if type(token) is not int or token >= vocabulary:
                known = f"expected token ids up to {vocabulary - 1}, by config.json's vocab_size"
                raise ConfigError(f"{said.where}: {name} has {shown(token)}: {known}; correct one of the two files")


def _inside(value: Any) -> Iterator[Any]:
    """Yields what a value, or lists in it, hold; nothing for None."""
    if isinstance(value, list):
        for each in value:
            yield from _inside(each)
    elif value is not None:
        yield value
