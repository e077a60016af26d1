"""Measures the executors on one GPU: rows for `eprt bench experts`.

A case is one rank's share of a layer under expert parallelism, fed as the all-gather dispatcher feeds it: all N rows
of the world, of whose N * K (token, k) pairs an even routing leaves N * K * L / E to this rank. Times are of CUDA-graph
replays, permute and un-permute included. The same run measures the baselines (`eprt.bench.baselines`): the executor's
library called directly, that library's kernels alone on inputs prepared beforehand, and other libraries' whole experts.
Two lower bounds: bytes of the experts that got a row over the measured copy bandwidth, and operations over the measured
rate of a large matrix product, of FP8 where activations may be FP8, else of bf16.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from eprt.bench.baselines import MISSING, baselines
from eprt.bench.report import Report, Row
from eprt.bench.routings import read_routing, sampled_tokens
from eprt.bench.shapes import SHAPES, shape_of
from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig, WeightFormat
from eprt.errors import ConfigError
from eprt.experts import EXECUTORS, Executor, executor_spec, make_executor
from eprt.placement import ExpertPlacement, ExpertShard
from eprt.rounding import ceil_div
from eprt.routing import Router
from eprt.support import Device
from eprt.timing import device_microseconds, host_microseconds, host_stopwatch
from eprt.tokens import FlatTokens
from eprt.weights import (
    FP8_BLOCK,
    INT4_GROUPS,
    MX_BLOCK,
    NVFP4_BLOCK,
    Dense,
    ExpertWeights,
    Fp8Block,
    Fp8Channel,
    Int4,
    Matrix,
    Mxfp4,
    Nvfp4,
)

VOCABULARY = 1024  # token ids of a random hash router


@dataclass(frozen=True)
class Ceilings:
    """Measured limits of the device: bytes a second of a copy (read and written), operations a second in bf16 and in
    FP8 with a scale per row (None on devices without)."""

    copy_bytes: float
    bf16_flops: float
    fp8_flops: float | None = None

    @classmethod
    def measure(cls, device: torch.device) -> Ceilings:
        source = torch.randn(1 << 29, device=device)
        copy_us = device_microseconds(partial(torch.neg, source, out=torch.empty_like(source)), repeats=2)
        moved = 2 * source.numel() * source.element_size()
        n = 8192
        left = torch.randn(n, n, device=device).to(torch.bfloat16)
        right = torch.randn(n, n, device=device).to(torch.bfloat16)
        flops_us = device_microseconds(partial(torch.mm, left, right), repeats=3)
        fp8 = None
        if Device.of(device).sm >= 90:
            rows, scale = [each.to(torch.float8_e4m3fn) for each in (left, right)], torch.ones(n, 1, device=device)
            product = partial(
                torch._scaled_mm, rows[0], rows[1].T, scale, scale.T, out_dtype=torch.bfloat16, use_fast_accum=True
            )
            fp8 = 2 * n**3 / device_microseconds(product, repeats=3) * 1e6
        return cls(moved / copy_us * 1e6, 2 * n**3 / flops_us * 1e6, fp8)

    def flops(self, activations: str) -> float:
        """Returns the rate of the arithmetic that is allowed: activations are "bf16" or "fp8"."""
        return self.fp8_flops if activations == "fp8" and self.fp8_flops else self.bf16_flops

    def as_dict(self) -> dict[str, float]:
        """Returns limits of a report: GB/s and TFLOP/s."""
        limits = {"copy_gb_per_s": self.copy_bytes / 1e9, "bf16_tflop_per_s": self.bf16_flops / 1e12}
        if self.fp8_flops:
            limits["fp8_tflop_per_s"] = self.fp8_flops / 1e12
        return {name: round(value, 1) for name, value in limits.items()}


def random_matrix(
    weight_format: WeightFormat, L: int, rows: int, cols: int, parts: int, device: torch.device, group: int = 32
) -> Matrix:
    """Returns random codes with scales near 1 / sqrt(cols). Raises ConfigError for a format no case uses."""
    size, codes = cols**-0.5, partial(torch.randint, 0, 256, (L, rows, cols // 2), dtype=torch.uint8, device=device)
    match weight_format:
        case "mxfp4":
            scales = torch.randint(118, 121, (L, rows, cols // MX_BLOCK), dtype=torch.uint8, device=device)
            return Mxfp4(codes(), scales)
        case "nvfp4":
            scales = torch.rand(L, rows, cols // NVFP4_BLOCK, device=device).add_(1).to(torch.float8_e4m3fn)
            second = torch.full((L, parts), size / 4, device=device) * torch.arange(1, parts + 1, device=device)
            # Blackwell's kernels quantise activations: 1 / 448 lets their blocks reach 6, six sigmas of normal tokens.
            return Nvfp4(codes(), scales, second, torch.full((L, parts), 1 / 448, device=device))
        case "int4":
            scales = torch.rand(L, rows, cols // group, device=device).add_(0.5)
            return Int4(codes(), (scales * size / 4).to(torch.bfloat16))
        case "fp8_block" | "fp8_channel":
            grid = (L, parts * ceil_div(rows // parts, FP8_BLOCK), ceil_div(cols, FP8_BLOCK))
            data = torch.empty(L, rows, cols, dtype=torch.float8_e4m3fn, device=device)
            for expert in data:
                expert.copy_(torch.randn(rows, cols, device=device))
            if weight_format == "fp8_channel":
                return Fp8Channel(data, torch.rand(L, rows, device=device).add_(0.5) * size)
            return Fp8Block(data, torch.full(grid, size, device=device))
        case "bf16":
            return Dense(torch.empty(L, rows, cols, dtype=torch.bfloat16, device=device).normal_(std=size))
        case _:
            formats = "mxfp4, nvfp4, int4, fp8_block, fp8_channel or bf16"
            raise ConfigError(f"no random {weight_format} weights: expected {formats}")


def random_experts(config: MoEConfig, L: int, device: torch.device, group: int = INT4_GROUPS[0]) -> ExpertWeights:
    H, I, parts = config.hidden_size, config.intermediate_size, config.activation.parts
    gate_up = random_matrix(config.weight_format, L, parts * I, H, parts, device, group)
    down = random_matrix(config.weight_format, L, H, I, 1, device, group)
    if not config.bias:
        return ExpertWeights(gate_up, down)
    return ExpertWeights(gate_up, down, torch.randn(L, parts * I, device=device), torch.randn(L, H, device=device))


def random_router(config: MoEConfig, device: torch.device) -> Router:
    """Returns a bf16 router with every tensor that the layer's routing needs; a hash table is of `VOCABULARY` ids."""
    E, H, method = config.num_experts, config.input_size, config.routing.method
    corrected = method in ("grouped_sigmoid", "sqrt_softplus")
    hashed = method == "hash"
    return Router(
        random_linear(device, E, H),
        config.routing,
        config.top_k,
        bias=random_linear(device, E) if config.bias else None,
        correction_bias=torch.zeros(E, device=device) if corrected else None,
        token_table=torch.rand(VOCABULARY, E, device=device).argsort(1)[:, : config.top_k].clone() if hashed else None,
    )


def random_linear(device: torch.device, *shape: int) -> torch.Tensor:
    """Returns bf16 weights near 1 / sqrt(the last size)."""
    return torch.randn(shape, device=device, dtype=torch.bfloat16) * shape[-1] ** -0.5


@dataclass(frozen=True)
class ExpertCase:
    """One executor, or another library, on one rank's share of a shape, in the weight format that it computes with."""

    executor: str
    shape: str
    config: MoEConfig

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(shape_of(self.shape).ep_size)

    @property
    def shard(self) -> ExpertShard:
        return ExpertPlacement(self.config.num_experts, self.parallel).shard(0)


def choose_cases(
    shapes: Collection[str], executors: Iterable[str] | None, runtime: RuntimeConfig, device: Device
) -> tuple[list[ExpertCase], list[str]]:
    """Returns the cases that can be measured there, and a line with the reason for every other. Needs no GPU.

    `executors` None: every row of `eprt.experts.EXECUTORS` but the reference. Raises ConfigError for an unknown name.
    """
    measured = [name for name, spec in EXECUTORS.items() if not spec.witness]  # nobody would time the witness
    names = measured if executors is None else list(executors)
    cases: list[ExpertCase] = []
    left_out: list[str] = []
    for shape, name in itertools.product(shapes, names):
        spec, config = executor_spec(name), shape_of(shape).config
        if config.weight_format in spec.decodes:
            config = replace(config, weight_format="bf16")
        case = ExpertCase(name, shape, config)
        # By name: what the plan wouldn't choose before it is measured is measured here.
        if verdict := spec.supports(config, case.parallel, replace(runtime, executor=name), device, "bf16"):
            cases.append(case)
        else:
            left_out.append(f"{name} on {shape}: {verdict.reason}")
    return cases, left_out


def experts_report(
    shapes: Collection[str] = SHAPES,
    executors: Iterable[str] | None = None,
    *,
    tokens: Sequence[int],
    runtime: RuntimeConfig | None = None,
    libraries: Sequence[str] = (),
    routing: str = "uniform",
    keep: Callable[[Report], None] = lambda _: None,
) -> Report:
    """Measures every case of `choose_cases` on this GPU, and other libraries' experts; the notes say what was left out.

    Args:
        libraries: names of other libraries' experts; empty: all that are installed; "none" for none.
        routing: how tokens choose experts, as `eprt.bench.routings.read_routing` takes it; each row has it.
        keep: called with what was found so far, case after case.

    Raises:
        ConfigError: an unknown shape, executor or library, a routing that doesn't fit a shape, or no CUDA device.
    """
    found, runtime = baselines(), runtime or RuntimeConfig()
    others = {} if found is None else found.EXPERTS
    if unknown := sorted(set(libraries) - {*others, "none"}):
        known = ", ".join([*others, "none"]) if found else f"none; {MISSING}"
        raise ConfigError(f"--libraries {unknown[0]!r}: expected {known}")
    choose_cases(shapes, executors, runtime, Device("cpu"))  # names that nobody knows are refused on any machine
    configs = {shape: shape_of(shape).config for shape in shapes if routing != "uniform"}
    routed = {shape: read_routing(routing, each.num_experts, each.top_k)[0] for shape, each in configs.items()}
    device = cuda_device("experts")
    cases, left_out = choose_cases(shapes, executors, runtime, Device.of(device))
    ceilings = Ceilings.measure(device)
    report = Report("experts", [], ceilings.as_dict(), left_out if found else [*left_out, MISSING])
    named = [name for name in libraries or others if name != "none"]
    for shape in shapes:
        samples = [sampled_tokens(shape_of(shape).config, count, device, routed.get(shape)) for count in tokens]
        jobs = [partial(_bench_executor, case, runtime) for case in cases if case.shape == shape]
        others = [ExpertCase(name, shape, shape_of(shape).config) for name in named]
        jobs += [partial(_bench_baseline, case, bool(libraries)) for case in others]
        for job in jobs:
            done = job(samples, device, ceilings)
            report.add(each if isinstance(each, str) else each | {"routing": routing} for each in done)
            keep(report)
            torch.cuda.empty_cache()
    return report


def cuda_device(bench: str) -> torch.device:
    """Returns this process's GPU. Raises ConfigError where there is none."""
    if not torch.cuda.is_available():
        raise ConfigError(f"bench {bench} times CUDA kernels: no CUDA device here")
    return torch.device("cuda", torch.cuda.current_device())


def _bench_executor(
    case: ExpertCase, runtime: RuntimeConfig, samples: Sequence[FlatTokens], device: torch.device, ceilings: Ceilings
) -> list[Row]:
    """Returns the rows of one of eprt's executors."""
    config, shard = case.config, case.shard
    weights = random_experts(config, shard.num_local_experts, device, shape_of(case.shape).group)
    activations = "fp8" if runtime.low_precision_activations else "bf16"
    row, layer_bytes = partial(_row, case, weights.nbytes, ceilings, activations), weights.nbytes
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    took: list[float] = []
    with host_stopwatch(took):
        executor = make_executor(case.executor, config, shard, weights, device, runtime, token_format="flat")
        torch.cuda.synchronize(device)
    peak = (torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)) / layer_bytes
    del weights
    with host_stopwatch(took):
        executor.warmup(max(flat.num_rows for flat in samples))
        torch.cuda.synchronize(device)
    costs = {"prepare_s": took[0] / 1e6, "warmup_s": took[1] / 1e6, "prepare_peak": peak}
    return [row(flat, _times(executor, flat) | costs) for flat in samples]


def _bench_baseline(
    case: ExpertCase, named: bool, samples: Sequence[FlatTokens], device: torch.device, ceilings: Ceilings
) -> list[Row] | list[str]:
    """Returns another library's rows, or a note why there are none. Whatever it raises is a reason: versions vary."""
    library: Any = baselines()
    other, config, shard = library.EXPERTS[case.executor], case.config, case.shard
    if not (verdict := other.supports(config, Device.of(device), named)):
        return [f"{case.executor} on {case.shape}: {verdict.reason}"]
    weights = random_experts(config, shard.num_local_experts, device, shape_of(case.shape).group)
    activations = "fp8" if config.weight_format in ("fp8_block", "fp8_channel") else "bf16"
    rows: list[Row] = []
    try:
        start = time.perf_counter()
        with other.make(config, shard, weights, device) as call_for:
            costs = {"prepare_s": time.perf_counter() - start}
            sample = sampled_tokens(config, library.CHECKED_TOKENS, device)
            library.check_experts(config, shard, weights, sample, call_for(sample)())
            costs |= {"warmup_s": time.perf_counter() - start - costs["prepare_s"], "prepare_peak": 0.0}
            for flat in samples:
                call = call_for(flat)
                times = _columns({"us": device_microseconds(call)}, host_microseconds(call))
                rows.append(_row(case, weights.nbytes, ceilings, activations, flat, times | costs))
    except Exception as error:  # noqa: BLE001
        return [f"{case.executor} on {case.shape}: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"]
    return rows


def _row(
    case: ExpertCase, layer_bytes: int, ceilings: Ceilings, activations: str, flat: FlatTokens, found: dict[str, Any]
) -> Row:
    """Returns one row of the report; microseconds unless said otherwise.

    Its columns, beside those of `_times`, the costs among `found`:
        executor: eprt's, or another library's experts (`benchmarks/baselines/experts.py`).
        activations: "fp8" where the executor was let quantise them (`low_precision_activations`), else "bf16".
        tokens: rows fed in.  local_rows: (token, k) pairs of local experts.  rows_per_expert: of those that got any.
        weights_us, flops_us: the two lower bounds.  ratio: us over the larger, None without local rows.
        prepare_s, warmup_s: seconds to build the layout and to warm up (compile, tune or read the cache).
        prepare_peak: peak memory of preparation beyond what is kept, over the layer's bytes.
    """
    config, L = case.config, case.shard.num_local_experts
    local = flat.ids[flat.ids < L]
    hit = local.unique().numel()
    flops = 2 * local.numel() * (config.gate_up_rows + config.intermediate_size) * config.hidden_size
    weights_us, flops_us = layer_bytes * hit / L / ceilings.copy_bytes * 1e6, flops / ceilings.flops(activations) * 1e6
    row = {"executor": case.executor, "shape": case.shape, "weight_format": config.weight_format}
    row |= {"activations": activations, "tokens": flat.num_rows, "local_rows": local.numel()}
    row |= {"rows_per_expert": local.numel() / max(hit, 1), **found, "weights_us": weights_us, "flops_us": flops_us}
    row["ratio"] = found["us"] / max(weights_us, flops_us) if local.numel() else None
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}


def _times(executor: Executor, flat: FlatTokens) -> dict[str, float | None]:
    """Returns microseconds per call: in a graph of the executor (us), of its library called directly (by_hand_us) and
    of the library's kernels alone (library_us), measured alternately and twice; then the host's time to issue one.

    Raises:
        EprtError: the direct call computes something else.
    """
    out = torch.empty_like(flat.hidden.data)
    run: dict[str, Callable[[], object]] = {"us": partial(executor, flat, out)}
    found, kernels = baselines(), getattr(executor, "library_call", None)
    if found is not None and (direct := found.direct_call(executor, flat)) is not None:
        found.check_direct(direct(), executor(flat, out))
        run["by_hand_us"] = direct
    if kernels is not None:
        run["library_us"] = kernels(flat)
    us = dict.fromkeys(run, float("inf"))
    for _ in range(2):
        for name, call in run.items():
            us[name] = min(us[name], device_microseconds(call))
    return _columns(us, host_microseconds(run["us"]))


def _columns(us: dict[str, float], host_us: float) -> dict[str, float | None]:
    return {name: us.get(name) for name in ("us", "by_hand_us", "library_us")} | {"host_us": host_us}
