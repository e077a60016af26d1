"""`eprt generate`: prompts in, tokens out, over several ranks. JSONL both ways."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from eprt.cli import generate_rank
from eprt.cli.arguments import Generate
from eprt.cli.generate_rank import Job, Part
from eprt.cli.journal import Journal
from eprt.cli.ranks import Ranks, ranks
from eprt.cli.run import checkpoint_directory
from eprt.cli.terminal import Terminal
from eprt.errors import ConfigError, InputError

# Without --prompts, and of the tiny checkpoint's vocabulary: one is longer, and the last rank has none.
EXAMPLES: tuple[dict[str, Any], ...] = (
    {"prompt": [11, 42, 7]},
    {"prompt": [5, 310, 99, 23, 4, 61, 17]},
    {"prompt": [256]},
)


def generate(arguments: Generate, terminal: Terminal) -> int:
    """The command. Returns 0."""
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
        job = Job(
            directory=str(directory.resolve()),
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            seed=arguments.seed,
            batch=arguments.batch,
            graphs=arguments.graphs,
            max_tokens_per_rank=arguments.max_tokens,
            timeout_s=workers.timeout_s,
        )
        _drive(job, prompts, workers, terminal, journal)
    return 0


def _drive(
    job: Job, prompts: list[dict[str, Any]], workers: Ranks, terminal: Terminal, journal: Journal | None
) -> None:
    # Under torchrun every rank is here, and rank 0 alone has read the prompts, and the journal.
    done = journal.done if journal is not None else 0
    if done:
        terminal.note(f"{done} of {len(prompts)} prompts are answered in the file already")
    prompts = workers.run(generate_rank.share, prompts=prompts[done:])[0]
    if not prompts:
        return
    started = time.perf_counter()
    loaded = workers.run(generate_rank.load, job=job)
    seconds = time.perf_counter() - started
    if not loaded[0].tokenizer and any(isinstance(row["prompt"], str) for row in prompts):
        raise InputError("a prompt is text and the checkpoint has no tokenizer: give token ids, or add its files")
    plan = f"dispatcher {loaded[0].dispatcher}, executor {loaded[0].executor}"
    terminal.note(f"{loaded[0].layers} MoE layers on {workers.size} ranks, ready after {seconds:.1f} s; {plan}")
    tokens, busy = [0] * workers.size, [0.0] * workers.size
    size = workers.size * job.batch
    rounds = [range(first, min(first + size, len(prompts))) for first in range(0, len(prompts), size)]
    with terminal.progress("prompts", len(rounds)) as progress:
        for numbers in rounds:
            shares = [list(numbers[rank :: workers.size]) for rank in range(workers.size)]
            given = [[prompts[number]["prompt"] for number in share] for share in shares]
            parts: list[Part] = workers.run(generate_rank.generate, job=job, prompts=given)
            found: dict[int, dict[str, Any]] = {}
            for rank, (share, part) in enumerate(zip(shares, parts, strict=True)):
                tokens[rank] += sum(map(len, part.tokens))
                busy[rank] += part.seconds
                for number, new, text in zip(share, part.tokens, part.texts, strict=True):
                    found[number] = {**prompts[number], "tokens": new, "rank": rank}
                    if text is not None:
                        found[number]["text"] = text
            answers = [found[number] for number in numbers]
            if journal is not None:
                journal.write(answers)
            else:
                terminal.lines(answers)
            progress.advance(f"{numbers.stop} of {len(prompts)} done, {sum(tokens)} tokens")
    workers.run(generate_rank.finish)
    rates = [count / seconds if seconds else 0.0 for count, seconds in zip(tokens, busy, strict=True)]
    each = ", ".join(f"{rate:,.1f}" for rate in rates)
    total = f"{sum(tokens)} tokens for {len(prompts)} prompts"
    terminal.note(f"{total}; tokens/s by rank: {each}; together {sum(rates):,.1f}")


def _read(path: Path | None) -> list[dict[str, Any]]:
    """The prompts, one JSON value a line. Raises InputError, ConfigError."""
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
