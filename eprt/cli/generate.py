"""Runs `eprt generate`: prompts in, tokens out, over several ranks, as JSON lines both ways."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eprt.cli.ranks import Ranks, ranks
from eprt.cli.run import checkpoint_directory
from eprt.cli.terminal import Terminal
from eprt.config import RuntimeConfig
from eprt.errors import ConfigError, InputError
from eprt.ranks.launcher import RankContext

if TYPE_CHECKING:
    from eprt.cli.arguments import Generate

Write = Callable[[list[dict[str, Any]]], None]
# Without --prompts, and of the tiny checkpoint's vocabulary: one is longer, and the last rank has none.
EXAMPLES: tuple[dict[str, Any], ...] = (
    {"prompt": [11, 42, 7]},
    {"prompt": [5, 310, 99, 23, 4, 61, 17]},
    {"prompt": [256]},
)


def generate(arguments: Generate, terminal: Terminal) -> int:
    """Continues the prompts. Returns 0."""
    for name in ("max_new_tokens", "batch"):
        if (value := getattr(arguments, name)) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if arguments.temperature < 0:
        raise ConfigError(f"--temperature {arguments.temperature}: must be 0 (greedy) or more")
    prompts = _read(arguments.prompts) if terminal.speaks else []
    path = arguments.output if terminal.speaks else None
    with (
        nullcontext() if path is None else closing(Journal(path, prompts)) as journal,
        checkpoint_directory(arguments.model, terminal.note) as directory,
        ranks(arguments.world, arguments.device) as workers,
    ):
        # Under torchrun every rank is here, and rank 0 alone has read the prompts, and the journal.
        done = journal.done if journal is not None else 0
        if done:
            terminal.note(f"{done} of {len(prompts)} prompts are answered in the file already")
        prompts = workers.run(share_prompts, prompts=prompts[done:])[0]
        if prompts:
            _load(arguments, directory, prompts, workers, terminal)
            _continue(arguments, prompts, workers, terminal, journal.write if journal is not None else terminal.lines)
    return 0


def _load(
    arguments: Generate, directory: Path, prompts: list[dict[str, Any]], workers: Ranks, terminal: Terminal
) -> None:
    started = time.perf_counter()
    # Graphs hold whole steps, not layers.
    runtime = RuntimeConfig(max_tokens_per_rank=arguments.max_tokens, layer_graphs=False if arguments.graphs else None)
    loaded: LoadedModel = workers.run(
        load_model,
        directory=str(directory.resolve()),
        runtime=runtime,
        graphs=arguments.graphs,
        seed=arguments.seed,
        behind_s=workers.timeout_s,
    )[0]
    if not loaded.tokenizer and any(isinstance(row["prompt"], str) for row in prompts):
        raise InputError("a prompt is text and the checkpoint has no tokenizer: give token ids, or add its files")
    terminal.note(
        f"{loaded.layers} MoE layers on {workers.size} ranks, ready after {time.perf_counter() - started:.1f} s; "
        f"dispatcher {loaded.dispatcher}, executor {loaded.executor}"
    )


def _continue(
    arguments: Generate, prompts: list[dict[str, Any]], workers: Ranks, terminal: Terminal, write: Write
) -> None:
    """Continues the prompts in rounds of `batch` per rank, and writes each round's answers in the prompts' order."""
    options: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens, "do_sample": arguments.temperature > 0}
    options |= {"temperature": arguments.temperature} if options["do_sample"] else {}
    tokens, busy = [0] * workers.size, [0.0] * workers.size
    size = workers.size * arguments.batch
    rounds = [range(first, min(first + size, len(prompts))) for first in range(0, len(prompts), size)]
    with terminal.progress("prompts", len(rounds)) as advance:
        for numbers in rounds:
            shares = [list(numbers[rank :: workers.size]) for rank in range(workers.size)]
            given = [[prompts[number]["prompt"] for number in share] for share in shares]
            by_rank = workers.run(continue_share, prompts=given, batch_size=arguments.batch, options=options)
            for rank, answers in enumerate(by_rank):
                tokens[rank] += sum(map(len, answers.tokens))
                busy[rank] += answers.seconds
            write(_rows(prompts, shares, by_rank))
            advance(f"{numbers.stop} of {len(prompts)} done, {sum(tokens)} tokens")
    rates = [count / seconds if seconds else 0.0 for count, seconds in zip(tokens, busy, strict=True)]
    each = f"tokens/s by rank: {', '.join(f'{rate:,.1f}' for rate in rates)}; together {sum(rates):,.1f}"
    terminal.note(f"{sum(tokens)} tokens for {len(prompts)} prompts; {each}")


def _rows(prompts: list[dict[str, Any]], shares: list[list[int]], by_rank: list[Answers]) -> list[dict[str, Any]]:
    """Returns a round's answers in the prompts' order; `shares` are each rank's numbers of prompts."""
    found: dict[int, dict[str, Any]] = {}
    for rank, (share, answers) in enumerate(zip(shares, by_rank, strict=True)):
        for number, new, text in zip(share, answers.tokens, answers.texts, strict=True):
            said = {} if text is None else {"text": text}
            found[number] = {**prompts[number], "tokens": new, "rank": rank, **said}
    return [row for _, row in sorted(found.items())]


def _read(path: Path | None) -> list[dict[str, Any]]:
    """Reads the prompts, one JSON value per line. Raises InputError, ConfigError."""
    if path is None:
        return [dict(example) for example in EXAMPLES]
    try:
        lines: Iterable[str] = sys.stdin if path == Path("-") else path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"--prompts {path}: {error.strerror or error}") from error
    return [_prompt(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]


def _prompt(line: str, where: str) -> dict[str, Any]:
    expected = 'expected {"prompt": "text" or [token ids]}, or the text or the ids alone'
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: not JSON ({error}): {expected}") from error
    found: dict[str, Any] = value if isinstance(value, dict) else {"prompt": value}
    prompt = found.get("prompt")
    ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not prompt or not (isinstance(prompt, str) or ids):
        raise InputError(f"{where}: {line.strip()[:80]}: {expected}")
    return found


class Journal:
    """The answers that an earlier run left in a file, and those that follow.

    A last line that was cut off as the run ended isn't counted, and is overwritten.

    Args:
        path: made if it isn't there.
        prompts: all of them; each answer repeats its prompt's fields.

    Attributes:
        done: how many prompts are answered.

    Raises:
        ConfigError: the file can't be read or written, or holds answers to other prompts.
    """

    def __init__(self, path: Path, prompts: Sequence[dict[str, Any]]) -> None:
        try:
            self._file = path.open("r+b" if path.exists() else "x+b")
            lines = self._file.read().splitlines(keepends=True)
        except OSError as error:
            raise ConfigError(f"--output {path}: {error.strerror or error}") from error
        whole = lines[:-1] if lines and not _is_answer(lines[-1]) else lines
        for number, line in enumerate(whole):
            if number >= len(prompts) or not _answers(line, prompts[number]):
                raise ConfigError(
                    f"{path}:{number + 1} answers another prompt than --prompts has there: name another file, or "
                    "remove it to begin again"
                )
        self.done = len(whole)
        self._file.seek(sum(map(len, whole)))
        self._file.truncate()

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        """Appends answers, and waits until they are on the disk. Raises OSError."""
        self._file.write("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _is_answer(line: bytes) -> bool:
    return line.endswith(b"\n") and _parsed(line) is not None


def _answers(line: bytes, prompt: dict[str, Any]) -> bool:
    row = _parsed(line)
    return row is not None and {name: row.get(name) for name in prompt} == prompt


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Returns the answer in a line, or None."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("tokens"), list) else None


# ---- the jobs of each rank: it loads the model without other ranks' experts, and continues its prompts ------------


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


def share_prompts(context: RankContext, prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the prompts that this rank has read; the caller takes rank 0's."""
    return prompts


def load_model(
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


def continue_share(
    context: RankContext, prompts: list[list[str | list[int]]], batch_size: int, options: dict[str, Any]
) -> Answers:
    """Continues `prompts[rank]`; `options` are transformers' own. Collective."""
    from eprt.integrations.transformers import generate

    held: _Model = context.cache["generate"]
    started = time.perf_counter()
    own = [held.ids(prompt) for prompt in prompts[context.rank]]
    tokens = generate(held.model, own, batch_size=batch_size, graphs=held.graphs, **options)
    seconds = time.perf_counter() - started
    return Answers(tokens, [held.text(new) for new in tokens], seconds)


@dataclass
class _Model:
    """A loaded model and its tokenizer; the rank closes it."""

    model: Any
    tokenizer: Any
    layers: list[Any]
    graphs: bool

    def ids(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        return list(self.tokenizer(prompt)["input_ids"])

    def text(self, tokens: list[int]) -> str | None:
        return None if self.tokenizer is None else str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def close(self) -> None:
        for layer in self.layers:
            layer.close()


def _tokenizer(directory: str) -> Any:
    """Loads the checkpoint's tokenizer from its files alone; None if it has none."""
    if not any((Path(directory) / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)
