"""Defines the flags, defaults and help of every command, which `eprt.cli.parsing` fills in. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import UseAppendAction

from eprt.config import ParallelConfig, RuntimeConfig
from eprt.errors import ConfigError

GPUS_PER_HOST = 8  # of a host that `eprt explain` isn't told about


# ---- flags that several commands share --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ranked:  # starts ranks, or is one of torchrun's, of which rank 0 alone speaks
    world: int | None = None
    """Ranks to start (torchrun's number wins under torchrun). Default: one for each GPU, 4 on CPUs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA if there is a GPU for each rank, else gloo on CPU."""


@dataclass(frozen=True, kw_only=True)
class _Plugins:
    plugin: Annotated[tuple[str, ...], UseAppendAction] = ()
    """Python module to import first in every rank: it may register backends and model families. May be repeated."""


@dataclass(frozen=True, kw_only=True)
class _Json:
    json: bool = False
    """Print one JSON object instead of tables."""


@dataclass(frozen=True, kw_only=True)
class Bench(_Plugins, _Json):
    output: Path | None = None
    """Also write the result as JSON to this file."""


@dataclass(frozen=True, kw_only=True)
class PlottedBench(Bench):
    plot: Path | None = None
    """Write a plot (PNG, SVG) to this file; needs matplotlib."""


@dataclass(frozen=True, kw_only=True)
class _TensorParallel:
    attention_tp: int = 1
    """Ranks that hold the same tokens."""
    moe_tp: int = 1
    """Ranks that share one expert."""


@dataclass(frozen=True, kw_only=True)
class _Pair:
    dispatcher: str = "auto"
    """How tokens travel; `eprt explain` lists them."""
    executor: str = "auto"
    """What computes the experts; `eprt explain` lists them."""


@dataclass(frozen=True, kw_only=True)
class _LowPrecision:
    low_precision_activations: bool = False
    """Let executors quantise activations to FP8, as DeepSeek-V3's were in training."""


# ---- the commands -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Run(Ranked, _TensorParallel, _Pair, _Plugins, _Json):
    """Drive a checkpoint's MoE layers on several ranks and check every output.

    Starts the ranks itself, or is one of them if torchrun started it. Exit code 0: every output is within tolerance; 1:
    one is not; 2: something can't work as asked; 75: a rank was lost.
    """

    model: Path | None = None
    """Checkpoint directory (safetensors + config.json). Without one, a tiny gpt-oss in MXFP4 is made."""
    layers: int | None = None
    """Run only the first N MoE layers."""
    steps: int = 10
    """Calls of each layer; each has other token counts, idle ranks included."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Options of transformers' GenerationConfig, by its names."""

    max_new_tokens: int | None = None
    """Tokens to add to each prompt, at most."""
    temperature: float | None = None
    """0 is greedy; above, tokens are sampled."""
    top_p: float | None = None
    """Sample from the fewest tokens whose probabilities add up to this."""
    top_k: int | None = None
    """Sample from this many most probable tokens; 0 is all."""
    min_p: float | None = None
    """Sample from tokens of at least this part of the most probable one's probability."""
    repetition_penalty: float | None = None
    """Divide the scores of tokens that were there before; 1 is none."""
    stop_strings: Annotated[tuple[str, ...], UseAppendAction] = ()
    """Text after which an answer ends. Repeat the flag for more than one."""


@dataclass(frozen=True, kw_only=True)
class Generate(Ranked, Generation, _Plugins):
    """Continue prompts with a transformers model whose experts are spread over several ranks; JSON lines in and out.

    Starts the ranks itself, or is one of them if torchrun started it. Results go to stdout (or --output) as they are
    finished, progress and tokens/s to stderr. Options of generation that aren't given are those of the checkpoint's
    generation_config.json, else the most probable tokens are taken, 32 of them at most.
    """

    model: Path | None = None
    """Checkpoint directory (safetensors + config.json) or hub id. Without one, a tiny gpt-oss in MXFP4 is made."""
    prompts: Path | None = None
    """JSON lines: {"prompt": "text" or [ids]} or {"messages": [...]}; - is stdin. Default: some for the tiny model."""
    output: Path | None = None
    """Write results to this file. The same command goes on where it was ended; any other file is left alone."""
    seed: int = 0
    """Seed of the sampling, from which each prompt has one by its number, unless its line has a "seed" of its own."""
    batch: int = 8
    """Prompts that each rank continues at once, of equal length where the model's attention carries state."""
    graphs: bool = False
    """Replay decode steps from CUDA graphs, where model and layers can be captured: the default on GPUs."""
    no_graphs: bool = False
    """Run every decode step eagerly."""
    max_tokens: int = 4096
    """Tokens per rank that buffers are sized for. Longer prompts and larger batches go through each layer in rounds."""


@dataclass(frozen=True, kw_only=True)
class Explain(_TensorParallel, _Plugins, _Json):
    """Show every dispatcher/executor pair with its reason, then the choice and other layouts of the same ranks.

    Needs no GPU, no kernel library and no weights.
    """

    model: Path
    """Checkpoint directory, a config.json, or the name of a well-known model (gpt-oss-120b, ...)."""
    world: int = 4
    """Ranks."""
    device: str = "cpu"
    """cpu, or a GPU's compute capability: sm90 (Hopper), sm100 (B200), ..."""
    ranks_per_host: int | None = None
    """Ranks per host; without it 8 for GPUs, all for CPUs."""
    hosts: int | None = None
    """Hosts, with the same number of ranks on each; instead of --ranks-per-host."""
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    """Settings that a layer would be built with; the same defaults."""
    plot: Path | None = None
    """Write a plot (PNG, SVG) of a layer's time over tokens per rank to this file; needs matplotlib."""

    @property
    def parallel(self) -> ParallelConfig:
        """The sizes of the world that is asked for. Raises ConfigError where its ranks don't fill the hosts."""
        W, hosts, per_host = self.world, self.hosts, self.ranks_per_host
        ParallelConfig(W)  # refuses what is no world, before its shares are looked for
        if hosts is not None and per_host is not None:
            raise ConfigError(f"--hosts {hosts} and --ranks-per-host {per_host}: give one of them")
        if hosts is not None:
            _require_share(W, hosts, f"--hosts {hosts}", "the same number of ranks on every host")
            per_host = W // hosts
        else:
            by_default = " (the default)" if per_host is None else ""
            if per_host is None:
                per_host = W if self.device == "cpu" else GPUS_PER_HOST
            per_host = min(per_host, W)
            _require_share(W, per_host, f"--ranks-per-host {per_host}{by_default}", "every host full")
        return ParallelConfig(W, self.attention_tp, self.moe_tp, per_host)


def _require_share(world: int, share: int, option: str, wanted: str) -> None:
    """Raises ConfigError unless `share` divides the ranks: the message has the shares that do."""
    if share < 1 or world % share:
        fitting = ", ".join(str(number) for number in range(1, world + 1) if world % number == 0)
        raise ConfigError(
            f"{option} of --world {world}: eprt plans for {wanted}, so that none is slower than the others; "
            f"use one of {fitting}"
        )


@dataclass(frozen=True, kw_only=True)
class Warm(_TensorParallel, _Plugins, _Json):
    """Compile the kernels of a model's experts ahead, on all processors: when an image is built, say.

    Needs no GPU and no weights. A start with the same cache (TRITON_CACHE_DIR), versions and sizes compiles none of
    them again.
    """

    model: Path
    """Checkpoint directory, a config.json, or the name of a well-known model (gpt-oss-120b, ...)."""
    device: str = "sm90"
    """The GPU's compute capability: sm90 (Hopper), sm80 (A100), ..."""
    world: int = 1
    """Ranks."""
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    """Settings that a layer will be built with. For vLLM, --max-tokens-per-rank is its --max-num-batched-tokens."""

    @property
    def parallel(self) -> ParallelConfig:
        """The sizes of the world that is asked for."""
        return ParallelConfig(self.world, self.attention_tp, self.moe_tp, min(self.world, GPUS_PER_HOST))


@dataclass(frozen=True, kw_only=True)
class Tune(Ranked, _Plugins, _Json):
    """Measure this machine for one model: its dispatchers and executors, as rows that the plan goes by first."""

    model: Path
    """Checkpoint directory, a config.json, or the name of a well-known model. Weights are made up."""
    tokens: tuple[int, ...] = (1, 8, 32, 128, 512, 1024, 4096)
    """Tokens per rank."""
    budget_s: float = 170.0
    """Seconds that measuring may take. What would take longer (kernels that are compiled first) is ended, and said."""
    output: Path | None = None
    """Also write the plans before and after, the seconds and what was cut as JSON to this file."""


@dataclass(frozen=True, kw_only=True)
class PlanExperts(_Plugins, _Json):
    """Plan where replicas of experts lie: balance before and after, and whether it pays. Needs no GPU."""

    slots: int
    """Places for experts on all ranks together. Those beyond the experts hold replicas, or stay empty if none pays."""
    counts: Path | None = None
    """How often experts are chosen, as eprt.balance.write_counts writes it; without it, Zipf."""
    zipf: float = 1.1
    """Exponent of the Zipf distribution that stands for counts."""
    experts: int | None = None
    """Experts of a layer, where neither counts nor a model say it."""
    world: int = 4
    """Ranks."""
    moe_tp: int = 1
    """Ranks that share one expert."""
    ranks_per_host: int | None = None
    """GPUs per host; without it all ranks are on one."""
    domain_size: int | None = None
    """Expert-parallel ranks of an NVLink domain, if that isn't the host."""
    current: Path | None = None
    """Placement file that holds now; the plan stays near it. Without one, experts lie in order."""
    model: Path | None = None
    """Checkpoint directory, a config.json, or the name of a well-known model, for the estimate of what it brings."""
    tokens: int = 8192
    """Tokens per rank in one forward, for that estimate."""
    device: str = "sm90"
    """The GPUs' compute capability, for that estimate."""
    phase: Literal["prefill", "decode"] = "prefill"
    """For that estimate: prefill has many tokens per rank, which replicas share; in decode one replica gets them."""
    out: Path | None = None
    """Write the placement file here."""


@dataclass(frozen=True, kw_only=True)
class Doctor(_Plugins, _Json):
    """A report to paste into an issue: versions, devices, links, and which backends work here and why not."""

    run: bool = False
    """Also run the conformance cases: on CPU ranks, and all GPUs if any. Under torchrun: -m eprt -- doctor --run."""
    faults: bool = False
    """Also break ranks on purpose, time how soon the others report it, and see that they go on where they are to."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Ranks of --faults: gloo ranks on the CPU, or one for each GPU, on every dispatcher that can run there."""
    trials: int | None = None
    """How many faults --faults tries, 2 to 10 s each. Default: 20 on the CPU, all on GPUs."""
    seeds: tuple[int, ...] = (0,)
    """Each is an order of the CPU's faults, of which --faults tries the first --trials."""
    jobs: int = 1
    """Trials of --faults at a time; on GPUs most of a trial is starting and waiting, so 10 on 64 cores are faster."""
    world: int = 4
    """CPU ranks of --run and --faults."""
    output: Path | None = None
    """Also write the trials of --faults as JSON to this file, after each of them."""
    resume: bool = False
    """Leave out trials of --faults that --output has, so that several short runs fill one table."""


# ---- the benches ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BenchLayer(Ranked, _Pair, _LowPrecision, PlottedBench):
    """Time of each phase of a layer, and what the layer adds to the same steps by hand.

    --routing takes uniform, zipf:1.1 (hot experts are neighbours), zipf:1.1:SEED (hot experts are random), counts as
    eprt.balance.write_counts writes them (.json), or recorded ids ([N, K] per layer, .safetensors).
    """

    shapes: tuple[str, ...] = ("tiny",)
    """Sizes of the layer: tiny, or those of `eprt bench experts` (gpt-oss-120b, qwen3-30b-a3b, ...)."""
    tokens: tuple[int, ...] = (1, 8, 32, 128)
    """Tokens per rank."""
    every_pair: bool = False
    """Each dispatcher with each executor that works here, of those asked for, instead of the plan's choice."""
    routing: str | None = None
    """Measure replicas instead, with experts chosen like this."""
    replicas: int | None = None
    """With --routing: slots beyond the experts, as many on each rank, planned from the same choices; default 0."""
    placement: Path | None = None
    """With --routing: the placement file to measure, instead of a planned one."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Name what --simulate computes times of, by the dispatchers' bytes and the plan's cost model.

    --routing takes uniform, zipf:EXPONENT (hot experts are neighbours), zipf:EXPONENT:SEED (hot experts are random),
    counts as eprt.balance.write_counts writes them (.json), or recorded ids ([N, K] per layer, .safetensors).
    """

    model: Path = Path("DeepSeek-V3")
    """Checkpoint directory, a config.json, or the name of a well-known model; its first kind of MoE layer."""
    gpu: str = "sm90"
    """Compute capability of the GPUs."""
    ranks: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024)
    """Sizes of the worlds."""
    ranks_per_host: int = 8
    """GPUs per host."""
    routing: tuple[str, ...] = ("uniform", "zipf:0.6:0")
    """How tokens choose experts; each in turn."""
    replicas: int = 0
    """Also simulate planned placements with this number of slots beyond the experts, as many on each rank."""


@dataclass(frozen=True, kw_only=True)
class BenchDispatch(Ranked, PlottedBench):
    """Dispatch + combine by every transport that works here, beside raw collectives and the link's own rate."""

    tokens: tuple[int, ...] = (1, 8, 32, 128, 512, 1024, 2048, 4096)
    """Tokens per rank."""
    shapes: tuple[Literal["h2880k4", "h7168k8"], ...] = ("h2880k4", "h7168k8")
    """Hidden size and top-k."""
    routings: tuple[Literal["uniform", "hot_expert"], ...] = ("uniform", "hot_expert")
    """How tokens choose experts."""
    transports: tuple[str, ...] = ()
    """Only these dispatchers and baselines; all that work here if none is named."""
    payload: Literal["bf16", "fp8_block"] = "bf16"
    """Number format that travels to the experts."""
    simulate: bool = False
    """Measure nothing: whole layers of worlds that needn't be here, by bytes and the plan's model."""
    simulation: Simulation = field(default_factory=Simulation)


@dataclass(frozen=True, kw_only=True)
class BenchExperts(_LowPrecision, PlottedBench):
    """The executors that work on this GPU, beside their libraries called directly, and the lower bounds that memory
    and compute set."""

    tokens: tuple[int, ...] = (1, 8, 32, 128, 512, 2048, 8192)
    """Tokens of all ranks."""
    shapes: tuple[str, ...] = ()
    """Only these layers (gpt-oss-120b, ...), or a model's, whole or cut (DeepSeek-V3:tp8, DIR:ep4). Default: all."""
    executors: tuple[str, ...] = ()
    """Only these executors; all that work here if none is named."""
    libraries: tuple[str, ...] = ()
    """Only these other libraries ("vllm triton", ...); the word none: no library. Default: all that are installed."""
    routing: str = "uniform"
    """How tokens choose experts, as `bench layer --routing` takes it."""


@dataclass(frozen=True, kw_only=True)
class BenchExchange(Ranked, Bench):
    """Measures what it costs the ranks to agree: a step, and its few words through shared memory and through gloo."""

    rounds: int = 1000
    """Exchanges of each kind."""


@dataclass(frozen=True, kw_only=True)
class BenchRouter(PlottedBench):
    """The router's kernels beside the same choice in plain torch, and the lower bounds that memory and compute set."""

    tokens: tuple[int, ...] = (1, 8, 32, 128, 512, 2048)
    """Tokens of this rank."""
    shapes: tuple[str, ...] = ()
    """Only these routers (gpt-oss-120b, ...); all if none is named."""


@dataclass(frozen=True, kw_only=True)
class BenchStep(Ranked, _Pair, PlottedBench):
    """A decode step of whole models: transformers alone, then eprt's layers eager, in steps and in CUDA graphs."""

    world: int | None = 2
    """Ranks to start (torchrun's number wins under torchrun)."""
    models: tuple[Literal["tiny", "gpt-oss-120b", "qwen3-30b-a3b", "deepseek-v3"], ...] = ("tiny",)
    """Widths of the models; their weights are random."""
    layers: int = 3
    """Attention + MoE layers of each."""
    tokens: tuple[int, ...] = (1, 8, 32, 128, 512)
    """Requests per rank, one token each."""
    rounds: int = 10
    """Times that ten steps in a row are measured."""
