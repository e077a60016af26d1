"""`eprt run`: a checkpoint's MoE layers on several ranks, every output held to the oracle."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eprt.cli import run_rank
from eprt.cli.arguments import Run
from eprt.cli.ranks import Ranks, ranks
from eprt.cli.run_rank import Job, Loaded, Step
from eprt.cli.terminal import Terminal
from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.conformance.cases import COUNTS, TOLERANCE, Batch
from eprt.conformance.oracle import relative_error
from eprt.conformance.whole_layer import expected_layer_output
from eprt.errors import ConfigError
from eprt.layer import PHASES
from eprt.models import LayerParts, family_for, load_layer
from eprt.models.checkpoint import Checkpoint
from eprt.models.hf_config import model_dtype
from eprt.ranks.scratch import Scratch
from eprt.tokens import TopK

# Tokens per rank of each step: all rows of the conformance table, idle ranks included.
TRAFFIC: tuple[tuple[int, ...], ...] = tuple(row for counts in COUNTS for row in counts.calls)

WHY = {
    torch.bfloat16: "bf16 keeps 8 bits (2^-9 = 0.2% a rounding); tokens, the values between an\n"
    "  expert's two matrices and outputs are each rounded once",
    torch.float32: "float32 on both sides, summed in another order",
}


@dataclass
class Tally:
    """What one rank did, over all layers and steps. Bytes and copies are None where only the device knows them."""

    tokens: int = 0
    copies_sent: int | None = 0
    copies_received: int | None = 0
    bytes_sent: int | None = 0
    bytes_received: int | None = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    error: float = 0.0

    def add(self, step: Step, error: float) -> None:
        self.tokens += step.hidden.shape[0]
        for name in ("copies_sent", "copies_received", "bytes_sent", "bytes_received"):
            before, more = getattr(self, name), getattr(step, name)
            setattr(self, name, None if before is None or more is None else before + more)
        for phase, seconds in step.seconds.items():
            self.seconds[phase] += seconds
        self.error = max(self.error, error)


def run(arguments: Run, terminal: Terminal) -> int:
    """The command. Returns 0 if every output is within tolerance, else 1."""
    if arguments.steps < 1 or (arguments.layers is not None and arguments.layers < 1):
        raise ConfigError(f"--steps {arguments.steps}, --layers {arguments.layers}: both must be at least 1")
    with (
        checkpoint_directory(arguments.model, terminal.say) as directory,
        ranks(arguments.world, arguments.device) as workers,
    ):
        return _drive(directory, arguments, workers, terminal)


def _drive(directory: Path, arguments: Run, workers: Ranks, terminal: Terminal) -> int:
    parallel = ParallelConfig(workers.size, arguments.attention_tp, arguments.moe_tp)
    with Checkpoint(directory) as checkpoint:
        family = family_for(checkpoint.config)
        dtype = model_dtype(family.text_config(checkpoint.config))
        layers = family.moe_layers(checkpoint.config)[: arguments.layers]
        if not layers:
            raise ConfigError(f"{directory}: the {checkpoint.config.get('model_type')} model has no MoE layers")
        config = family.moe_config(checkpoint.config, layers[0])
    job = Job(
        directory=str(directory.resolve()),
        attention_tp=arguments.attention_tp,
        moe_tp=arguments.moe_tp,
        runtime=RuntimeConfig(
            dispatcher=arguments.dispatcher, executor=arguments.executor, max_tokens_per_rank=max(map(max, TRAFFIC))
        ),
        counts=tuple(TRAFFIC[step % len(TRAFFIC)] for step in range(arguments.steps)),
        dtype=str(dtype).removeprefix("torch."),
        timeout_s=workers.timeout_s,
    )
    outcome = _Outcome(parallel, job, dtype)
    with terminal.progress("layer", len(layers)) as progress:
        for layer in layers:
            started = time.perf_counter()
            outcome.loaded = workers.run(run_rank.load, job=job, layer=layer)
            seconds = time.perf_counter() - started
            steps = [workers.run(run_rank.drive, job=job, layer=layer, step=step) for step in range(len(job.counts))]
            if terminal.speaks:
                outcome.judge(load_layer(job.directory, layer), steps)
            size = sum(rank.weight_bytes for rank in outcome.loaded)
            progress.advance(f"loaded {size / 1e6:,.1f} MB of experts in {seconds:.1f} s, {len(steps)} steps driven")
    workers.run(run_rank.finish)
    return _report(outcome, arguments.model, layers, config, workers, terminal)


class _Outcome:
    """What the ranks returned, judged."""

    def __init__(self, parallel: ParallelConfig, job: Job, dtype: torch.dtype) -> None:
        self.parallel, self.job, self.dtype = parallel, job, dtype
        self.tolerance = TOLERANCE[dtype]
        self.loaded: list[Loaded] = []
        self.ranks = [Tally() for _ in range(parallel.world_size)]
        self.steps = [0.0] * len(job.counts)

    @property
    def error(self) -> float:
        return max(rank.error for rank in self.ranks)

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance

    def judge(self, parts: LayerParts, steps: list[list[Step]]) -> None:
        """Compare one layer's outputs with the oracle's."""
        size = self.parallel.attention_tp_size
        for number, step in enumerate(steps):
            for first in range(0, len(step), size):
                group = step[first : first + size]
                expected = expected_layer_output(parts, _whole_batch(group, parts.config))
                for rank, one in enumerate(group, first):
                    error = relative_error(one.output, expected)
                    self.ranks[rank].add(one, error)
                    self.steps[number] = max(self.steps[number], error)


def _whole_batch(group: list[Step], config: MoEConfig) -> Batch:
    """An attention-TP group's tokens, with the routing that its ranks chose for their slices of them."""
    hidden = group[0].hidden
    ids = torch.full((hidden.shape[0], config.top_k), config.num_experts, dtype=torch.int32)
    weights = torch.zeros(ids.shape)
    for step in group:
        rows = slice(*step.sent)
        ids[rows], weights[rows] = step.ids, step.weights
    return Batch(hidden, TopK(ids, weights))


@contextmanager
def checkpoint_directory(model: Path | None, say: Callable[[str], None]) -> Iterator[Path]:
    """The checkpoint directory: the one given, or a tiny one that goes away afterwards."""
    if model is not None:
        yield model
        return
    from eprt.conformance.tiny_model import write_tiny_checkpoint

    with Scratch("tiny") as folder:
        say("No --model: made a tiny gpt-oss checkpoint (random weights, the published MXFP4 format).")
        yield write_tiny_checkpoint(folder / "gpt-oss-tiny")


# ---- what is said -------------------------------------------------------------------------------------------


def _report(
    outcome: _Outcome, model: Path | None, layers: list[int], config: MoEConfig, workers: Ranks, terminal: Terminal
) -> int:
    plan = outcome.loaded[0].plan
    transport = "gloo" if workers.device == "cpu" else "NCCL"
    what = (
        f"{_count(len(layers), 'MoE layer')} of {model or 'the tiny gpt-oss'} ({_count(config.num_experts, 'expert')} "
        f"in {config.weight_format}, top-{config.top_k}) ran on {_count(workers.size, f'{transport} rank')}, "
        f"{_count(len(outcome.steps), 'step')} each"
    )
    terminal.say(f"\nPlan: dispatcher {plan['dispatcher']}, executor {plan['executor']}, {plan['tokens']} tokens")
    terminal.say(f"  why: {plan['reason']}; `eprt explain` lists every candidate")
    terminal.table(
        "Each rank, all layers and steps together",
        ["rank", "experts", "tokens", "copies out", "copies in", "kB out", "kB in", "error"],
        _rank_rows(outcome),
    )
    calls = len(layers) * len(outcome.steps)
    terminal.table(
        "Milliseconds of each phase, mean of one layer call, waiting for others included",
        ["rank", *PHASES],
        [
            [rank, *(f"{1e3 * tally.seconds[phase] / calls:.2f}" for phase in PHASES)]
            for rank, tally in enumerate(outcome.ranks)
        ],
    )
    terminal.table(
        "Each step (error: worst rank and layer)",
        ["step", "tokens per rank", "error"],
        [[n, " ".join(map(str, _counts(outcome, n))), f"{error:.1e}"] for n, error in enumerate(outcome.steps)],
    )
    terminal.say(
        "\ncopies: token rows that crossed between ranks in dispatch, and came back in combine;\n  kB counts both ways."
    )
    terminal.say(
        "error = ||output - oracle|| / ||oracle||. The oracle: one process, float32, all experts as loaded,\n"
        "  each token to those its rank chose; its formulas are the executor reference's, written apart from others."
    )
    terminal.say(f"tolerance {outcome.tolerance:.0e}: {WHY[outcome.dtype]}.")
    verdict = "PASS" if outcome.ok else "FAIL"
    relation = "<=" if outcome.ok else ">"
    terminal.say(f"\n{verdict}: {what}; worst error {outcome.error:.1e} {relation} {outcome.tolerance:.0e}")
    terminal.result(_as_json(outcome, what, plan, workers))
    return 0 if outcome.ok else 1


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _counts(outcome: _Outcome, step: int) -> list[int]:
    size = outcome.parallel.attention_tp_size
    return [outcome.job.tokens(step, rank // size) for rank in range(outcome.parallel.world_size)]


def _rank_rows(outcome: _Outcome) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for rank, (tally, loaded) in enumerate(zip(outcome.ranks, outcome.loaded, strict=True)):
        traffic = [tally.copies_sent, tally.copies_received]
        volume = [tally.bytes_sent, tally.bytes_received]
        rows.append(
            [
                rank,
                f"{loaded.first_expert}-{loaded.end_expert - 1}",
                tally.tokens,
                *("-" if copies is None else copies for copies in traffic),
                *("-" if size is None else f"{size / 1e3:.1f}" for size in volume),
                f"{tally.error:.1e}",
            ]
        )
    return rows


def _as_json(outcome: _Outcome, what: str, plan: dict[str, str], workers: Ranks) -> dict[str, Any]:
    return {
        "ok": outcome.ok,
        "what": what,
        "world": workers.size,
        "device": workers.device,
        "plan": plan,
        "error": outcome.error,
        "tolerance": outcome.tolerance,
        "tolerance_because": " ".join(WHY[outcome.dtype].split()),
        "ranks": [
            {"rank": rank, "experts": [loaded.first_expert, loaded.end_expert], **vars(tally)}
            for rank, (tally, loaded) in enumerate(zip(outcome.ranks, outcome.loaded, strict=True))
        ],
        "steps": [
            {"tokens_per_rank": _counts(outcome, step), "error": error} for step, error in enumerate(outcome.steps)
        ],
    }
