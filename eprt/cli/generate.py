"""Runs `eprt generate`: prompts in, tokens out, over several ranks, as JSON lines both ways."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from eprt.cli import generate_rank
from eprt.cli.arguments import Generate
from eprt.cli.generate_rank import Answers, LoadedModel
from eprt.cli.journal import Journal
from eprt.cli.ranks import Ranks, ranks
from eprt.cli.run import checkpoint_directory
from eprt.cli.terminal import Terminal
from eprt.config import RuntimeConfig
from eprt.errors import ConfigError, InputError

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
        prompts = workers.run(generate_rank.share, prompts=prompts[done:])[0]
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
        generate_rank.load,
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
    arguments: Generate,
    prompts: list[dict[str, Any]],
    workers: Ranks,
    terminal: Terminal,
    write: Callable[[list[dict[str, Any]]], None],
) -> None:
    """Continues the prompts in rounds of `batch` per rank, and writes each round's answers in the prompts' order."""
    sampled = arguments.temperature > 0
    options: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens, "do_sample": sampled}
    options |= {"temperature": arguments.temperature} if sampled else {}
    tokens, busy = [0] * workers.size, [0.0] * workers.size
    size = workers.size * arguments.batch
    rounds = [range(first, min(first + size, len(prompts))) for first in range(0, len(prompts), size)]
    with terminal.progress("prompts", len(rounds)) as progress:
        for numbers in rounds:
            shares = [list(numbers[rank :: workers.size]) for rank in range(workers.size)]
            given = [[prompts[number]["prompt"] for number in share] for share in shares]
            by_rank: list[Answers] = workers.run(
                generate_rank.generate, prompts=given, batch_size=arguments.batch, options=options
            )
            found: dict[int, dict[str, Any]] = {}
            for rank, (share, answers) in enumerate(zip(shares, by_rank, strict=True)):
                tokens[rank] += sum(map(len, answers.tokens))
                busy[rank] += answers.seconds
                for number, new, text in zip(share, answers.tokens, answers.texts, strict=True):
                    said = {} if text is None else {"text": text}
                    found[number] = {**prompts[number], "tokens": new, "rank": rank, **said}
            write([found[number] for number in numbers])
            progress.advance(f"{numbers.stop} of {len(prompts)} done, {sum(tokens)} tokens")
    rates = [count / seconds if seconds else 0.0 for count, seconds in zip(tokens, busy, strict=True)]
    each = ", ".join(f"{rate:,.1f}" for rate in rates)
    total = f"{sum(tokens)} tokens for {len(prompts)} prompts"
    terminal.note(f"{total}; tokens/s by rank: {each}; together {sum(rates):,.1f}")


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
