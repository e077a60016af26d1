"""Runs `eprt run`: a checkpoint's MoE layers on several ranks, every output held to the oracle."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import torch

from eprt.bench.timing import clocked_phases
from eprt.cli.arguments import Run
from eprt.cli.ranks import Ranks, ranks
from eprt.cli.terminal import Terminal, columns, counted
from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.conformance.cases import COUNTS, TOLERANCE, Batch, Counts
from eprt.conformance.checks import NanOutput
from eprt.conformance.oracle import expected_layer_output, relative_error
from eprt.conformance.tiny_model import write_tiny_checkpoint
from eprt.dispatch import Dispatched
from eprt.dispatch.call import Traffic
from eprt.errors import ConfigError
from eprt.experts import executor_spec
from eprt.layer import PHASES, ExpertParallelMoE
from eprt.models import LayerParts, build_layer, family_for, load_layer
from eprt.models.checkpoint import Checkpoint, load_on_all_ranks
from eprt.models.hf_config import model_dtype
from eprt.ranks.launcher import RankContext
from eprt.ranks.scratch import Scratch
from eprt.tokens import RouterLogits, TopK

_SEED = 8128
# What moves between ranks, under our name and `Traffic`'s.
MOVED = {
    "copies_sent": "rows_sent",
    "copies_received": "rows_received",
    "bytes_sent": "bytes_sent",
    "bytes_received": "bytes_received",
}
# Tokens per rank of each step: all rows of the conformance table, idle ranks included.
TRAFFIC = Counts("all", tuple(row for counts in COUNTS for row in counts.calls))

WHY = {
    torch.bfloat16: "bf16 keeps 8 bits (2^-9 = 0.2% a rounding); tokens, the values between an "
    "expert's two matrices and outputs are each rounded once",
    torch.float32: "float32 on both sides, summed in another order",
}


def _kilobytes(name: str) -> Callable[[dict[str, Any]], str | None]:
    return lambda row: None if row[name] is None else f"{row[name] / 1e3:.1f}"


RANKS = columns(
    "rank | experts | tokens | copies out = copies_sent | copies in = copies_received | kB out = out | kB in = in_ | "
    "error = error:.1e",
    experts=lambda row: f"{row['experts'][0]}-{row['experts'][1] - 1}",
    out=_kilobytes("bytes_sent"),
    in_=_kilobytes("bytes_received"),
)
STEPS = columns(
    "step | tokens per rank = tokens | error = error:.1e", tokens=lambda row: " ".join(map(str, row["tokens_per_rank"]))
)


def run(arguments: Run, terminal: Terminal) -> int:
    """Drives the layers. Returns 0 if every output is within tolerance, else 1."""
    if arguments.steps < 1 or (arguments.layers is not None and arguments.layers < 1):
        raise ConfigError(f"--steps {arguments.steps}, --layers {arguments.layers}: both must be at least 1")
    with (
        checkpoint_directory(arguments.model, terminal.say) as directory,
        ranks(arguments.world, arguments.device) as workers,
    ):
        ParallelConfig(workers.size, arguments.attention_tp, arguments.moe_tp)
        layers, config, dtype = _layers_of(directory, arguments.layers)
        outcome = _drive(arguments, directory, layers, dtype, workers, terminal)
        report = _report(outcome, arguments.model, layers, config, dtype, workers)
    _say(report, len(layers), terminal)
    terminal.result(report)
    return 0 if report["ok"] else 1


def _layers_of(directory: Path, most: int | None) -> tuple[list[int], MoEConfig, torch.dtype]:
    """Returns the numbers of the first MoE layers, the first one's config, and the tokens' dtype."""
    with Checkpoint(directory) as checkpoint:
        family = family_for(checkpoint.config)
        layers = family.moe_layers(checkpoint.config)[:most]
        if not layers:
            raise ConfigError(f"{directory}: the {checkpoint.config.get('model_type')} model has no MoE layers")
        config = family.moe_config(checkpoint.config, layers[0])
        return layers, config, model_dtype(family.text_config(checkpoint.config))


class _Outcome:
    """The results of all ranks, held to the oracle and added up over layers and steps.

    Attributes:
        ranks, steps: one row for each rank and each step. Bytes and copies are None where only the device knows them.
        plan: the last loaded layer's.
    """

    def __init__(self, arguments: Run, size: int) -> None:
        self._group = arguments.attention_tp
        counts = (TRAFFIC.of(step, size) for step in range(arguments.steps))
        tokens = [[row[rank // self._group] for rank in range(size)] for row in counts]
        self.steps: list[dict[str, Any]] = [{"tokens_per_rank": row, "error": 0.0} for row in tokens]
        zeros = dict.fromkeys(("tokens", *MOVED, "error"), 0)
        self.ranks: list[dict[str, Any]] = [
            {"rank": rank, "experts": None, **zeros, "seconds": dict.fromkeys(PHASES, 0.0)} for rank in range(size)
        ]
        self.plan: dict[str, str] = {}

    def judge(self, parts: LayerParts, steps: list[list[DrivenStep]]) -> None:
        """Compares one layer's outputs with the oracle's."""
        for number, results in enumerate(steps):
            for first in range(0, len(results), self._group):
                group = results[first : first + self._group]
                # An attention-TP group's tokens; each of its ranks has routed a slice of them.
                ids, weights = (torch.cat(slices) for slices in zip(*(step.topk for step in group), strict=True))
                expected = expected_layer_output(parts, Batch(group[0].hidden, TopK(ids, weights)))
                for rank, result in enumerate(group, first):
                    error = relative_error(result.output, expected)
                    self._add(self.ranks[rank], result, error)
                    self.steps[number]["error"] = max(self.steps[number]["error"], error)

    def _add(self, row: dict[str, Any], result: DrivenStep, error: float) -> None:
        row["tokens"] += result.hidden.shape[0]
        row["error"] = max(row["error"], error)
        for name, field in MOVED.items():
            more = None if result.traffic is None else getattr(result.traffic, field)
            row[name] = None if row[name] is None or more is None else row[name] + more
        for phase, times in result.us.items():
            row["seconds"][phase] += sum(times) / 1e6


def _drive(
    arguments: Run, directory: Path, layers: list[int], dtype: torch.dtype, workers: Ranks, terminal: Terminal
) -> _Outcome:
    outcome, where = _Outcome(arguments, workers.size), str(directory.resolve())
    runtime = RuntimeConfig(arguments.dispatcher, arguments.executor, max_tokens_per_rank=max(map(max, TRAFFIC.calls)))
    sizes = (arguments.attention_tp, arguments.moe_tp, workers.timeout_s)
    with terminal.progress("layer", len(layers)) as advance:
        for layer in layers:
            started = time.perf_counter()
            loaded = workers.run(load, directory=where, layer=layer, sizes=sizes, runtime=runtime)
            seconds = time.perf_counter() - started
            outcome.plan = loaded[0][2]
            for row, (experts, _, _) in zip(outcome.ranks, loaded, strict=True):
                row["experts"] = experts
            steps = [
                workers.run(drive, layer=layer, step=number, tokens=step["tokens_per_rank"], dtype=dtype)
                for number, step in enumerate(outcome.steps)
            ]
            if terminal.speaks:
                outcome.judge(load_layer(where, layer), steps)
            size = sum(weight_bytes for _, weight_bytes, _ in loaded)
            advance(f"loaded {size / 1e6:,.1f} MB of experts in {seconds:.1f} s, {counted(len(steps), 'step')} driven")
    return outcome


@contextmanager
def checkpoint_directory(model: Path | None, say: Callable[[str], None]) -> Iterator[Path]:
    """Yields the checkpoint directory: the one given, or a tiny one that is removed afterwards."""
    if model is not None:
        yield model
        return
    with Scratch("tiny") as folder:
        say("No --model: made a tiny gpt-oss checkpoint (random weights, the published MXFP4 format).")
        yield write_tiny_checkpoint(folder / "gpt-oss-tiny")


# ---- the report -------------------------------------------------------------------------------------------------


def _report(
    outcome: _Outcome, model: Path | None, layers: list[int], config: MoEConfig, dtype: torch.dtype, workers: Ranks
) -> dict[str, Any]:
    transport = "gloo" if workers.device == "cpu" else "NCCL"
    exact = config.weight_format == "f32" or executor_spec(outcome.plan["executor"]).witness
    computed = dtype if exact else torch.bfloat16  # kernels of packed weights have no float32
    error, tolerance = max(rank["error"] for rank in outcome.ranks), TOLERANCE[computed]
    packed = "" if computed == dtype else f"experts in {config.weight_format} are computed in bf16; "
    return {
        "ok": error <= tolerance,
        "what": f"{counted(len(layers), 'MoE layer')} of {model or 'the tiny gpt-oss'} "
        f"({counted(config.num_experts, 'expert')} in {config.weight_format}, top-{config.top_k}) ran on "
        f"{counted(workers.size, f'{transport} rank')}, {counted(len(outcome.steps), 'step')} each",
        "world": workers.size,
        "device": workers.device,
        "plan": outcome.plan,
        "error": error,
        "tolerance": tolerance,
        "tolerance_because": packed + WHY[computed],
        "ranks": outcome.ranks,
        "steps": outcome.steps,
    }


def _say(report: dict[str, Any], layers: int, terminal: Terminal) -> None:
    plan, rows, calls = report["plan"], report["ranks"], layers * len(report["steps"])
    terminal.say(
        f"\nPlan: dispatcher {plan['dispatcher']}, executor {plan['executor']}, {plan['tokens']} tokens\n"
        f"  why: {plan['reason']}; `eprt explain` lists every candidate"
    )
    terminal.table("Each rank, all layers and steps together", RANKS, rows)
    terminal.table(
        "Milliseconds of each phase, mean of one layer call, waiting for others included",
        {"rank": "rank", **{phase: f"{phase}:.2f" for phase in PHASES}},
        [{"rank": row["rank"], **{k: 1e3 * s / calls for k, s in row["seconds"].items()}} for row in rows],
    )
    steps = [{"step": number, **step} for number, step in enumerate(report["steps"])]
    terminal.table("Each step (error: worst rank and layer)", STEPS, steps)
    because = f"tolerance {report['tolerance']:.0e}: {report['tolerance_because']}."
    verdict, relation = ("PASS", "<=") if report["ok"] else ("FAIL", ">")
    terminal.say(
        "\ncopies: token rows that crossed between ranks in dispatch, and came back in combine;\n  kB counts both ways."
        "\nerror = ||output - oracle|| / ||oracle||. The oracle: one process, float32, all experts as loaded,\n"
        "  each token to those its rank chose; its formulas are the executor reference's, written apart from others."
        f"\n{fill(because, 100, subsequent_indent='  ')}"
        f"\n\n{verdict}: {report['what']}; worst error {report['error']:.1e} {relation} {report['tolerance']:.0e}"
    )


# ---- the jobs of each rank: it loads its experts and calls the layer ---------------------------------------------


def load(
    context: RankContext, directory: str, layer: int, sizes: tuple[int, int, float], runtime: RuntimeConfig
) -> tuple[list[int], int, dict[str, str]]:
    """Loads this rank's experts of a layer and warms it up. Collective; closes the layer before.

    Returns the experts (first, and one past the last), their bytes, and the layer's plan.
    """
    world = context.world(*sizes)
    context.release("layer")
    parts = load_on_all_ranks(world, lambda: load_layer(directory, layer, world.parallel, world.rank), layer)
    moe = context.cache["layer"] = build_layer(parts, world, runtime)
    world.warmup(moe)
    moe.executor = NanOutput(moe.executor)  # so that a row it forgets shows
    plan = {name: getattr(moe.plan, name) for name in ("dispatcher", "executor", "reason")}
    experts = [parts.shard.first_expert, parts.shard.end_expert]
    return experts, parts.experts.nbytes, plan | {"tokens": moe.plan.token_format}


@dataclass(frozen=True)
class DrivenStep:
    """One call of the layer on one rank.

    Attributes:
        hidden: [T, H] that the rank passed in; output: [T, H] that it got back.
        topk: ids and weights of the rows that this rank dispatched itself (a slice of them under attention TP), as the
            layer's own router chose them.
        traffic: what moved between ranks; None if only the device knows.
        us: microseconds by phase; waiting for other ranks counts.
    """

    hidden: torch.Tensor
    output: torch.Tensor
    topk: tuple[torch.Tensor, torch.Tensor]
    traffic: Traffic | None
    us: dict[str, list[float]]


def drive(context: RankContext, layer: int, step: int, tokens: list[int], dtype: torch.dtype) -> DrivenStep:
    """Calls the loaded layer once, with `tokens[rank]` tokens."""
    moe: ExpertParallelMoE = context.cache["layer"]
    world, T = moe.world, tokens[context.rank]
    generator = torch.Generator().manual_seed(_SEED + 7919 * layer + 97 * step + world.dp_rank)
    hidden = torch.randn(T, moe.config.input_size, generator=generator).to(dtype)
    token_ids = None
    if moe.router is not None and (table := moe.router.token_table) is not None:
        token_ids = torch.randint(table.shape[0], (T,), generator=generator).to(world.device)
    seen: list[TopK | RouterLogits | Dispatched] = []
    moe.see = lambda _, found: seen.append(found)
    with clocked_phases([moe], with_device=True) as us, world.step(T, number=step):
        output = moe(hidden.to(world.device), token_ids=token_ids)
    [topk] = (found for found in seen if isinstance(found, TopK))
    sent = next(found.handle for found in seen if isinstance(found, Dispatched))
    return DrivenStep(hidden, output.cpu(), (topk.ids.cpu(), topk.weights.cpu()), sent.traffic, dict(us))
