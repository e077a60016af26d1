"""Measures a decode step of a whole model: transformers alone, then with its MoE blocks over the ranks.

Every rank runs its own batch through the same random weights, attention and head included; the layers are fewer, all
widths are the model's. The baseline of the same run is transformers' own model, whole on each rank, in bf16. All rows
make the same step on a StaticCache: one token a request, an explicit mask, logits and their argmax.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from eprt.bench.layer import random_layer
from eprt.bench.report import Row, p50_p99, percentile, slowest
from eprt.bench.timing import clocked_calls, clocked_phases, settle, world_of
from eprt.config import RuntimeConfig
from eprt.conformance.tiny_model import gpt_oss_config
from eprt.errors import ConfigError
from eprt.graphs import StepGraphs
from eprt.graphs.recording import Pool, Recording, refusal
from eprt.layer import ExpertParallelMoE
from eprt.models import family_for
from eprt.models.published import MODELS as MODEL_CONFIGS
from eprt.ranks.process import RankContext
from eprt.timing import host_stopwatch
from eprt.world import World

_PUBLISHED = {"gpt-oss-120b": "gpt-oss-120b", "qwen3-30b-a3b": "Qwen3-30B-A3B", "deepseek-v3": "DeepSeek-V3"}
CONTEXT = 64  # positions of the cache; a round fits, so that no step runs past its end
_STEPS, _WARM_STEPS = 10, 3  # of a round; they follow each other as in a decode loop


@dataclass(frozen=True)
class StepCase:
    """One model on every rank: `layers` of it, sized for each number of `tokens` (requests) per rank."""

    model: str
    layers: int
    tokens: tuple[int, ...]
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    rounds: int = 10

    def __str__(self) -> str:
        return self.model


@dataclass(frozen=True)
class StepTimes:
    """One rank's microseconds of one way of stepping, a mean for each round.

    Attributes:
        step: from one step to the next.  host: until the host has issued it.  moe_host: of that, in one MoE block.
        phases: of that, in each of `eprt.layer.PHASES`, a mean, where the layer is ours and eager.
    """

    tokens: int
    path: str
    step: list[float]
    host: list[float]
    moe_host: list[float]
    phases: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class StepFound:
    """One rank's result for a model; `pair` is "dispatcher + executor", `notes` say what was left out, and why."""

    times: list[StepTimes]
    pair: str
    notes: list[str]


class _Batch:
    """A batch of requests: their tokens, their cache, and a step."""

    def __init__(self, model: Any, tokens: int, device: torch.device) -> None:
        from transformers import StaticCache

        from eprt.integrations.transformers.decode import CACHE

        self._model, dtype = model, torch.bfloat16
        self.cache: Any = StaticCache(config=model.config, max_cache_len=CONTEXT)
        self._given = {CACHE: self.cache, "use_cache": True}
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._positions = torch.zeros(tokens, 1, dtype=torch.int64, device=device)
        mask = torch.zeros(tokens, 1, 1, CONTEXT, dtype=dtype, device=device)
        layered = hasattr(model.config, "layer_types") and model.config.model_type == "gpt_oss"
        self._mask: Any = {"full_attention": mask, "sliding_attention": mask} if layered else mask
        self.token = torch.randint(0, model.config.vocab_size, (tokens, 1), device=device)

    def __call__(self, token: torch.Tensor) -> torch.Tensor:
        """Returns the next tokens [rows, 1] of these [rows, 1]."""
        output = self._model(
            token, cache_position=self._position, position_ids=self._positions, attention_mask=self._mask, **self._given
        )
        return output.logits[:, -1:].argmax(-1)


def _config_of(name: str, layers: int) -> dict[str, Any]:
    """Returns the published config.json cut to `layers` layers, each of which has experts."""
    published = gpt_oss_config(1, 8, 4, 128, 256) if name == "tiny" else dict(MODEL_CONFIGS[_PUBLISHED[name]])
    if published["model_type"] == "gpt_oss":  # a short context: no window would be full
        published["layer_types"] = ["full_attention"] * layers
    if "first_k_dense_replace" in published:
        published["first_k_dense_replace"] = 0
    return published | {"num_hidden_layers": layers}


def make_model(published: dict[str, Any], device: torch.device) -> Any:
    """Returns the model of a config.json in bf16, with random weights on the device. Raises ConfigError without
    transformers."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError("bench step runs transformers' own models: pip install 'eprt[transformers]'") from error
    fields = {key: value for key, value in published.items() if key not in ("quantization_config", "architectures")}
    config: Any = AutoConfig.for_model(**fields)
    config.dtype = torch.bfloat16
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


def measure_step(context: RankContext, case: StepCase) -> StepFound:
    """Measures this rank's share of one model. Collective; a job for `WorldPool.run`. Where the model's layers can't be
    built, the bench ends."""
    world = world_of(context)
    torch.manual_seed(world.rank)
    with torch.no_grad():
        hf = _config_of(case.model, case.layers)
        model, family = make_model(hf, world.device), family_for(hf)
        paths = [family.module_path(number) for number in family.moe_layers(hf)]
        found = _Measured(model, world, case, [model.get_submodule(path) for path in paths])
        found.measure("transformers")
        if world.device.type == "cuda":
            found.measure("transformers graph", capture=True)
        layers = _parallelized(model, hf, world, case)
        found.blocks = [model.get_submodule(path) for path in paths]
        try:
            _measure_ours(found, layers)
        finally:
            world.warm, world.buckets = False, ()  # this World serves the next model, too
            for layer in layers:
                layer.close()
    pair = f"{layers[0].plan.dispatcher} + {layers[0].plan.executor}"
    return StepFound(found.times, pair, found.notes)


def _parallelized(model: nn.Module, hf: dict[str, Any], world: World, case: StepCase) -> list[ExpertParallelMoE]:
    """Replaces the model's MoE blocks by layers over the world, experts in the number format of the checkpoint."""
    family = family_for(hf)
    runtime = replace(case.runtime, max_tokens_per_rank=max(case.tokens), layer_graphs=world.device.type == "cuda")
    layers: list[ExpertParallelMoE] = []
    for number in family.moe_layers(hf):
        parent, _, name = family.module_path(number).rpartition(".")
        setattr(model.get_submodule(parent), name, nn.Identity())  # its experts make room
        gc.collect()
        layers.append(random_layer(family.moe_config(hf, number), world, runtime, number))
        setattr(model.get_submodule(parent), name, _Block(layers[-1], family.returns_scores))
    world.warmup(*layers)
    return layers


class _Block(nn.Module):
    """Calls a layer as the model's decoder layer calls its MoE block."""

    def __init__(self, layer: ExpertParallelMoE, returns_scores: bool) -> None:
        super().__init__()
        self.layer, self._returns_scores = layer, returns_scores

    def forward(self, hidden_states: torch.Tensor, *_: object, **__: object) -> Any:
        output = self.layer(hidden_states)
        return (output, None) if self._returns_scores else output


def _measure_ours(found: _Measured, layers: list[ExpertParallelMoE]) -> None:
    world, by_layer = found.world, [(layer, layer.graphs) for layer in layers]

    def set_graphs(on: bool) -> None:
        for layer, graphs in by_layer:
            layer.graphs = graphs if on else None

    def idle() -> None:
        """Runs the step of a rank without requests."""
        for layer in layers:
            layer(torch.empty(0, layer.config.input_size, dtype=torch.bfloat16, device=world.device))

    set_graphs(False)
    found.measure("eager")
    found.measure("in a step", found.in_a_step)
    if reason := refusal(layers[0]) if world.device.type == "cuda" else "a CPU world has none":
        found.notes.append(f"{found.case.model}: graphs: {reason}")
        return
    set_graphs(True)
    found.measure("layer graphs", found.in_a_step)
    set_graphs(False)
    example = {"token": torch.zeros(1, 1, dtype=torch.int64, device=world.device)}
    graphs = StepGraphs(world, layers, found.forward, example, buckets=tuple(found.batches), idle=idle)
    graphs.capture()
    found.measure("step graph", lambda token: graphs(len(token), token=token))


class _Measured:
    """Times ways of stepping, and keeps what it found.

    Args:
        blocks: the model's MoE blocks: transformers' own, then ours.
    """

    def __init__(self, model: nn.Module, world: World, case: StepCase, blocks: list[nn.Module]) -> None:
        self.world, self.case, self.blocks = world, case, blocks
        self.batches = {tokens: _Batch(model, tokens, world.device) for tokens in case.tokens}
        self.times: list[StepTimes] = []
        self.notes: list[str] = []

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        """Makes a step of the batch of as many tokens."""
        return self.batches[len(token)](token)

    def in_a_step(self, token: torch.Tensor) -> torch.Tensor:
        with self.world.step(len(token)):
            return self.forward(token)

    def measure(self, path: str, call: Callable[[torch.Tensor], object] | None = None, capture: bool = False) -> None:
        """Times `call` on each batch, by default the batch's own step; captured in a graph if `capture`."""
        for batch in self.batches.values():
            play = partial(call or batch, batch.token)
            self._begin(batch)
            for _ in range(_WARM_STEPS):
                play()
            settle(self.world)
            try:
                batch.cache.reset()
                timed = Recording.of(play, Pool(), self.world).play if capture else play
            except RuntimeError as error:  # of a baseline, which may synchronise anywhere
                reason = str(error).splitlines()[0]
                self.notes.append(f"{self.case.model}, {len(batch.token)} tokens, {path}: {reason}")
            else:
                self._time(path, batch, timed)

    def _time(self, path: str, batch: _Batch, play: Callable[[], object]) -> None:
        steps, hosts = map(list, zip(*(self._round(batch, play) for _ in range(self.case.rounds)), strict=True))
        inside = [] if path.endswith(" graph") else self._inside_blocks(batch, play)
        phases = self._inside_phases(batch, play) if path in ("eager", "in a step") else {}
        self.times.append(StepTimes(len(batch.token), path, steps, hosts, inside, phases))

    def _begin(self, batch: _Batch) -> None:
        batch.cache.reset()
        settle(self.world)
        self.world.barrier()

    def _round(self, batch: _Batch, call: Callable[[], object]) -> tuple[float, float]:
        """Returns the microseconds of one step, and of the host's part in it."""
        self._begin(batch)
        found: list[float] = []
        with host_stopwatch(found):
            with host_stopwatch(found):
                for _ in range(_STEPS):
                    call()
            settle(self.world)
        return found[1] / _STEPS, found[0] / _STEPS

    def _inside_blocks(self, batch: _Batch, call: Callable[[], object]) -> list[float]:
        """Returns the host's time per MoE block, a mean for each step. The clock takes time too, so this runs apart."""
        spent: list[float] = []
        with clocked_calls(self.blocks, spent):
            self._steps(batch, call)
        count = len(self.blocks)
        return [sum(spent[i : i + count]) / count for i in range(0, len(spent), count)]

    def _inside_phases(self, batch: _Batch, call: Callable[[], object]) -> dict[str, float]:
        """Returns the host's mean time in each phase of our layers; apart again."""
        layers = [block.layer for block in self.blocks if isinstance(block, _Block)]
        with clocked_phases(layers) as found:
            self._steps(batch, call)
        return {phase: sum(times) / len(times) for phase, times in found.items()}

    def _steps(self, batch: _Batch, call: Callable[[], object]) -> None:
        self._begin(batch)
        for _ in range(_STEPS):
            call()
            settle(self.world)


# ---- rows -----------------------------------------------------------------------------------------------------


def step_rows(case: StepCase, by_rank: list[StepFound]) -> list[Row | str]:
    """Returns rows of the report, then its notes. Times are the slowest rank's, over all rounds; ratios are to
    transformers' eager step, and to its step in a graph, where one was measured."""
    rows: list[Row] = []
    medians: dict[tuple[int, str], float] = {}
    for times in zip(*(found.times for found in by_rank), strict=True):
        row, at = _row(case, by_rank[0].pair, times), (times[0].tokens, times[0].path)
        medians[at] = percentile(slowest([t.step for t in times]), 50)
        for name, baseline in (("of_eager", "transformers"), ("of_graph", "transformers graph")):
            base = medians.get((at[0], baseline))
            row[name] = None if base is None else round(medians[at] / base, 3)
        rows.append(row)
    return [*rows, *by_rank[0].notes]


def _row(case: StepCase, pair: str, times: Sequence[StepTimes]) -> Row:
    path, inside = times[0].path, slowest([t.moe_host for t in times])
    host = percentile(slowest([t.host for t in times]), 50)
    row: Row = {"model": case.model, "ranks": len(times), "layers": case.layers, "tokens": times[0].tokens}
    row |= {"path": path, "pair": "" if path.startswith("transformers") else pair}
    row |= p50_p99("step", [t.step for t in times])
    row |= {"host_us": round(host, 1), "host_us_per_layer": round(host / case.layers, 1)}
    row["moe_host_us"] = round(percentile(inside, 50), 1) if inside else None
    for phase in times[0].phases:
        row[f"{phase}_host_us"] = round(max(t.phases[phase] for t in times), 1)
    return row
