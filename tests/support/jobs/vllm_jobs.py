"""Jobs for test_vllm_plugin.py: the plugin's way through the stand-in, on the ranks of a gloo world."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock
from unittest.mock import Mock

import torch

from eprt.bench.experts import random_experts
from eprt.config import MoEConfig, WeightFormat
from eprt.errors import CapacityError
from eprt.integrations.engine import balancing
from eprt.integrations.engine.bound import BoundLayer
from eprt.integrations.engine.parameters import ParameterLayout
from eprt.integrations.engine.ranks import redistribute
from eprt.integrations.engine.sleeping import Kept
from eprt.integrations.engine.state import describe
from eprt.integrations.vllm.routing import take_over_gates
from eprt.integrations.vllm.worker import put_to_sleep
from eprt.placement import EMPTY, ExpertPlacement
from support.builders import live_tensors, said
from support.stand_ins import vllm as stand_in

E, K, H, I = 8, 2, 32, 64
TOKENS = [3, 5]
message = partial(said, kinds=Exception)  # vLLM's own are of any type


def experts(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, 2I, H], [E, H, I] of all ranks."""
    generator = torch.Generator().manual_seed(layer)
    up = torch.randn(E, 2 * I, H, generator=generator).mul(0.2).bfloat16()
    return up, torch.randn(E, H, I, generator=generator).mul(0.2).bfloat16()


def tokens(rank: int, seed: int = 100, hot: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weights and ids of a rank. Most of the tokens choose one of two hot experts, if there are any."""
    generator = torch.Generator().manual_seed(seed + rank)
    T = TOKENS[rank]
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)])
    for row in range(T if hot else 0):
        if row % 4 and hot[row % 2] not in ids[row]:
            ids[row, 0] = hot[row % 2]
    return torch.randn(T, H, generator=generator).bfloat16(), torch.rand(T, K, generator=generator), ids


def config(**changes: Any) -> Any:
    return stand_in.host(
        model_config__enforce_eager=True,
        scheduler_config__max_num_batched_tokens=16,
        compilation_config__cudagraph_capture_sizes=[],
        **changes,
    )


def balanced_config(**options: int) -> Any:
    found = config(additional_config={"eprt": {"eplb": options}})
    found.device_config = SimpleNamespace(device_type="cpu")
    return found


def share(context: Any) -> slice:
    return slice(context.rank * E // context.size, (context.rank + 1) * E // context.size)


def made(vllm: Any, context: Any, name: str, kind: type | None = None, number: int = 0, **moe: Any) -> Any:
    """A RoutedExperts with this rank's share of the experts of layer `number`."""
    up, down = experts(number)
    mine = {"w13_weight": up[share(context)], "w2_weight": down[share(context)]}
    described = stand_in.moe_config(moe.pop("num_experts", E), K, H, I, context.size, **moe)
    return vllm.routed(name, described, "silu", mine, kind or stand_in.UnquantizedFusedMoEMethod)


def loaded(vllm: Any, context: Any, name: str, number: int = 0) -> Any:
    layer = made(vllm, context, name, number=number)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


@contextmanager
def plugin(context: Any, given: Any = None, unfit: str = "", *, dense: bool = False) -> Iterator[Any]:
    """The plugin in the stand-in, under `config` or another."""
    context.world()  # torch.distributed, as vLLM's own start-up leaves it
    with stand_in.installed(given or config(), TOKENS, unfit, dense=dense) as vllm, torch.inference_mode():
        yield vllm


def applied(layer: Any, rank: int) -> torch.Tensor:
    return layer.quant_method.apply(layer, *tokens(rank), None, None).float()


def two_layers(context: Any) -> dict[str, Any]:
    """Made, loaded and called; then a layer loaded later, as a draft model's would be."""
    found: dict[str, Any] = {}
    with plugin(context) as vllm:
        layers = [made(vllm, context, f"layers.{number}", number=number) for number in range(2)]
        found["classes"] = [type(layer.quant_method).__name__ for layer in layers]
        found["monolithic"] = layers[0].quant_method.is_monolithic
        found["ids"] = layers[0].quant_method.topk_indices_dtype
        for layer in layers:
            layer.quant_method.process_weights_after_loading(layer)
        found["left_in_vllm"] = sum(p.numel() for layer in layers for p in layer.parameters())
        found["cold"] = len(vllm.state.cold)
        found["outputs"] = [applied(layer, context.rank) for layer in layers]
        found["warm"] = (len(vllm.state.cold), vllm.state.worlds["same tokens"].warm)
        vllm.context.is_padding = torch.arange(16) >= 1  # all but the first row
        found["padded"] = applied(layers[0], context.rank)
        split = made(vllm, context, "layers.4", is_sequence_parallel=True)
        split.quant_method.process_weights_after_loading(split)
        hidden, weights, ids = tokens(context.rank)
        ids[1:] = -1  # `router/fused_topk_router.py` since vLLM 0.32 goes by the mask in such layers, too
        found["split"] = split.quant_method.apply(split, hidden, weights, ids, None, None).float()
        vllm.context.is_padding = torch.ones(16, dtype=torch.bool)  # left from a capture, where vLLM keeps none up
        with mock.patch.dict(sys.modules, {"vllm.envs": SimpleNamespace(VLLM_MOE_SKIP_PADDING=False)}):
            found["outputs"].append(applied(loaded(vllm, context, "layers.2", 2), context.rank))
        vllm.context.is_padding = None
        layers[0].quant_method.process_weights_after_loading(layers[0])  # nothing was loaded since
        found["again"] = applied(layers[0], context.rank)
        hidden, *choice = tokens(context.rank)
        found["float16"] = layers[0].quant_method.apply(layers[0], hidden.half(), *choice, None, None)
        found["monolithic_call"] = message(lambda: layers[0].quant_method.apply_monolithic(layers[0], None, None))
        # vLLM's own: it chooses a kernel, which this machine doesn't have.
        kinds = stand_in.MoeWNA16Method, stand_in.PerTokenMethod
        found["left"] = [message(lambda kind=kind: made(vllm, context, "layers.3", kind)) for kind in kinds]
        found["reasons"] = {reason: list(names) for reason, names in vllm.state.fallbacks.items()}
    return found


def routed(context: Any) -> dict[str, Any]:
    """Layers whose gate vLLM's runner holds, a known block calls, another block calls; batch-invariant ones, too."""
    found: dict[str, Any] = {"gates": {}, "compiled": {}}
    weight = torch.randn(E, H, generator=torch.Generator().manual_seed(7)).bfloat16()
    for invariant in (False, True):
        given = config(additional_config={"eprt": {"batch_invariant": invariant}})
        with plugin(context, given) as vllm:
            layers = [loaded(vllm, context, f"layers.{number}", number) for number in range(3)]
            kinds = stand_in.HoldsGate, stand_in.MLPBlock, stand_in.OtherBlock
            blocks = [
                kind(stand_in.ReplicatedLinear(weight), stand_in.FusedTopKRouter(K, E), layer)
                for kind, layer in zip(kinds, layers, strict=True)
            ]
            for _ in range(2):  # a second look changes nothing
                take_over_gates(stand_in.model_of(given, blocks))
            found["gates"][invariant] = [layer.router is not None for layer in vllm.state.built]
            found["compiled"][invariant] = given.additional_config.get("eprt_gates")
            hidden, _, _ = tokens(context.rank)
            for number in () if invariant else (0, 1):
                weights, ids = blocks[number].choose(hidden)
                output = layers[number].quant_method.apply(layers[number], hidden, weights, ids, None, None).float()
                found[number] = {"weights": weights, "ids": ids, "output": output}
                vllm.context.is_padding = torch.arange(16) >= 1  # all but the first row
                found["padded"] = blocks[number].choose(hidden)[1]
                vllm.context.is_padding = None
    return found


def load(layer: Any, number: int, chosen: Any = range(E), parts: str = "w1 w3 w2") -> None:
    """What a model's `load_weights` does with experts of set `number`, named one by one; parameters may be freed."""
    up, down = experts(number)
    for e in chosen:
        for shard, matrix in zip(("w1", "w3", "w2"), (*up[e].chunk(2), down[e]), strict=True):
            if shard in parts.split():
                parameter = layer.get_parameter("w2_weight" if shard == "w2" else "w13_weight")
                parameter.weight_loader(parameter, matrix, f"{shard}.weight", shard, e)


def reload_layerwise(layer: Any, number: int, chosen: Any = range(E)) -> None:
    """What vLLM's layerwise reload does: parameters made anew, undefined where nothing is loaded. A layer is finished
    when this rank's experts are there; other ranks' may come after that."""
    held = E // layer.moe_config.ep_size
    for name, shape in (("w13_weight", (2 * I, H)), ("w2_weight", (H, I))):
        parameter = layer.get_parameter(name)
        parameter.data = torch.full((held, *shape), torch.nan, dtype=torch.bfloat16)
    own = [e for e in chosen if layer._map_global_expert_id_to_local_expert_id(e) >= 0]
    load(layer, number, own)
    layer.quant_method.process_weights_after_loading(layer)
    load(layer, number, set(chosen) - set(own))


def copy_whole(context: Any, layer: Any, number: int) -> None:
    """What vLLM's gpt-oss in bf16 does: it calls no loader."""
    for name, tensor in zip(("w13_weight", "w2_weight"), experts(number), strict=True):
        layer.get_parameter(name).copy_(tensor[share(context)])


def reloaded(context: Any, path: str = "") -> dict[str, Any]:
    """Outputs of a layer after each of some loads, in every way that vLLM has for them; then one that lacks a part."""
    options = config(additional_config={"eprt": {"placement": path}} if path else {})
    with plugin(context, options) as vllm:
        layer, other = (loaded(vllm, context, "model.layers.3.mlp.experts") for _ in range(2))
        at = [t.data_ptr() for t in layer.quant_method.eprt.layer.executor.slot_tensors().values()]
        outputs = [applied(layer, context.rank)]
        load(other, 1, parts="w2")  # nothing was loaded by name before, as with `--load-format dummy`
        first = message(vllm.state.before_step)
        load(other, 1)
        reload_layerwise(layer, 1)
        outputs.append(applied(layer, context.rank))
        load(layer, 2)
        load(other, 2)  # the next layer begins: the first one's memory is given back
        freed = layer.get_parameter("w13_weight").numel()
        vllm.state.before_step()
        outputs.append(applied(layer, context.rank))
        copy_whole(context, layer, 3)
        vllm.state.before_step()
        outputs.append(applied(layer, context.rank))
        if not path:
            load(layer, 4, [0, 5])
            vllm.state.before_step()
            reload_layerwise(layer, 4, [1, 2, 6])
            load(layer, 4, [3, 4, 7])
            vllm.state.before_step()
            outputs.append(applied(layer, context.rank))
        found = _lacking(vllm, layer, len(outputs), [4] if path else [0, 4])
        outputs.append(applied(layer, context.rank))
        built = layer.quant_method.eprt.layer
        return found | {
            "outputs": outputs,
            "first": first,
            "stayed": at == [t.data_ptr() for t in built.executor.slot_tensors().values()],
            "freed": freed + sum(p.numel() for p in (*layer.parameters(), *other.parameters())),
        }


def balanced(context: Any, redundant: int, steps: int, **options: Any) -> dict[str, Any]:
    """Errors of a layer's outputs while what is hot changes, and the placements that it had. The first move finds no
    memory."""
    errors, placements, at = [], [], set()

    def call(layer: Any, number: int, seed: int, hot: list[int]) -> None:
        drawn = tokens(context.rank, seed, hot)
        want = formula(number, *drawn)
        y = layer.quant_method.apply(layer, *drawn, None, None).double()
        errors.append(float((y - want).abs().max() / want.abs().max()))

    outcomes = itertools.chain([CapacityError("no memory")], itertools.repeat(mock.DEFAULT))
    without_memory = mock.patch.object(balancing, "rebalance", wraps=balancing.rebalance, side_effect=outcomes)
    given = balanced_config(window_size=4, step_interval=8, num_redundant_experts=redundant)
    given.additional_config["eprt"] |= options
    with without_memory, plugin(context, given) as vllm:
        vllm.state.take_over_balancing(given)
        layers = [loaded(vllm, context, f"layers.{n}", n) for n in range(2)]
        for step in range(steps):
            vllm.state.before_step()
            for number, layer in enumerate(layers):
                call(layer, number, 1000 * step, [(step // 10 + number) * 3 % E, (step // 10) * 5 % E])
            built = [layer.quant_method.eprt.layer for layer in layers]
            placements.append(tuple(one.placement.slots for one in built))
            at.add(tuple(t.data_ptr() for one in built for t in one.executor.slot_tensors().values()))
        reload_layerwise(layers[0], 1)
        vllm.state.before_step()
        call(layers[0], 1, 0, [1, 2])
    changes = sum(a != b for a, b in itertools.pairwise(placements))
    return {"worst": max(errors), "changes": changes, "first": placements[0], "moved": vllm.state.balancing.moved,
            "addresses": len(at)}  # fmt: skip


def undivided(context: Any) -> dict[str, list[str]]:
    """What is said of a layer whose slots don't divide by the ranks."""
    given = balanced_config(num_redundant_experts=1)
    with plugin(context, given) as vllm:
        vllm.state.take_over_balancing(given)
        message(lambda: made(vllm, context, "layers.0"))  # vLLM's own, which looks for a kernel
        return vllm.state.fallbacks


def formula(number: int, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """A SwiGLU layer in float64."""
    up, down = (matrix.double() for matrix in experts(number))
    gate, value = torch.einsum("th,tkih->tki", x.double(), up[ids]).chunk(2, dim=-1)
    inside = gate * torch.sigmoid(gate) * value
    return (torch.einsum("tki,tkhi->tkh", inside, down[ids]) * weights.double()[..., None]).sum(1)


def slept(context: Any, path: str) -> dict[str, Any]:
    """Outputs of a layer before and after all memory that its loading took was lost, all but what sleep keeps."""
    options = {"placement": path, "count_load": True}
    with plugin(context, config(additional_config={"eprt": options})) as vllm:
        before = live_tensors()
        layer = loaded(vllm, context, "model.layers.3.mlp.experts")
        every = [each for number, each in live_tensors().items() if number not in before]
        outputs, kept, said = [applied(layer, context.rank)], Kept(), []
        for _ in range(2):
            put_to_sleep(vllm.state, kept, lambda tensor: True)
            put_to_sleep(vllm.state, kept, lambda tensor: True)  # asleep already
            for tensor in every:
                tensor.fill_(77)
            kept.restore()
            said.append(message(vllm.state.before_step))
            reload_layerwise(layer, 0)
            vllm.state.before_step()
            outputs.append(applied(layer, context.rank))
        built = layer.quant_method.eprt.layer
        return {"outputs": outputs, "said": said, "counted": int(built.load().sum()), "lost": len(every)}


def _lacking(vllm: Any, layer: Any, number: int, without: list[int]) -> dict[str, str]:
    """What is heard of a load in which some experts lack their up matrix; then a whole one comes. Of `without`, those
    of one rank alone make an error on all ranks where experts are placed elsewhere."""
    load(layer, number, [e for e in range(E) if e not in without])
    load(layer, number, without, "w1 w2")
    found = {"lacking": message(vllm.state.before_step), "then": message(vllm.state.before_step)}
    found["call"] = message(lambda: applied(layer, 0))
    load(layer, number)
    vllm.state.before_step()
    return found


def tensor_parallel(context: Any, *, dense: bool, dp_size: int) -> dict[str, Any]:
    """Without expert parallelism: this rank's rows of every expert, the same tokens on each rank, partial outputs.
    Data-parallel ranks have tokens of their own, and padding behind the first."""
    with plugin(context, dense=dense) as vllm:
        up, down = experts(0)
        part = slice(context.rank * I // context.size, (context.rank + 1) * I // context.size)
        mine = torch.cat([half[:, part] for half in up.chunk(2, dim=1)], dim=1), down[:, :, part]
        described = stand_in.moe_config(E, K, H, I, context.size, use_ep=False, dp_size=dp_size)
        named = dict(zip(("w13_weight", "w2_weight"), mine, strict=True))
        layer = vllm.routed("layers.0", described, "silu", named, stand_in.UnquantizedFusedMoEMethod)
        layer.quant_method.process_weights_after_loading(layer)
        stand_in.init_modular_kernel(layer.quant_method)
        vllm.context.dp_metadata = None
        rank = context.rank if dp_size > 1 else 0
        output = applied(layer, rank)
        vllm.context.is_padding = torch.arange(16) >= 1
        return {
            "output": output,
            "padded": applied(layer, rank),
            "internal": layer.quant_method.supports_internal_mk,  # else the runner gathers in front of the router
            "reduced": layer.quant_method.moe_kernel.output_is_reduced(),
            "line": describe(vllm.state.bindings, 1),
            "ranks": [world.size for world in vllm.state.worlds.values()],
        }


def placed(context: Any, path: str) -> dict[str, Any]:
    """A layer whose experts lie as the file says, though vLLM loads them in order; layers that it doesn't fit; then
    those of drafts, which are in no file. What tokens choose is counted, and nothing balanced."""
    with plugin(context, config(additional_config={"eprt": {"placement": path, "count_load": True}})) as vllm:
        layer = loaded(vllm, context, "model.layers.3.mlp.experts")
        output = applied(layer, context.rank)
        built = layer.quant_method.eprt.layer
        drafts = ("model.layers.48.mtp_block.mlp.experts", E), ("mtp.layers.3.mlp.experts", 16), ("mlp.experts", E)
        tagged = {"vllm.compilation.backends": SimpleNamespace(model_tag="eagle_head")}
        found = {
            "output": output,
            "slots": built.placement.slots,
            "held": built.placement.num_local_experts,
            "line": describe(vllm.state.bindings, 1),
            "no layer": message(lambda: made(vllm, context, "model.layers.4.mlp.experts")),
            "no number": message(lambda: made(vllm, context, "mlp.experts")),
            "other experts": message(lambda: made(vllm, context, "model.layers.3.mlp.experts", num_experts=16)),
        }
        with mock.patch.dict(sys.modules, tagged):
            for name, count in drafts:
                made(vllm, context, name, num_experts=count)
        return found | {"drafts": [binding.placement for binding in vllm.state.bindings[1:]]}


def other_files(context: Any, folder: Path) -> list[str]:
    """What a rank hears whose placement file isn't the others', or who has none."""
    said: list[str] = []
    for path in (folder / f"{context.rank}.json", folder / "1.json" if context.rank else None):
        options = {} if path is None else {"placement": str(path)}
        with plugin(context, config(additional_config={"eprt": options})) as vllm:
            said.append(message(lambda vllm=vllm: loaded(vllm, context, "model.layers.3.mlp.experts")))
    return said


def spread_experts(context: Any, weight_format: WeightFormat) -> list[str]:
    """Tensors of this rank's slots that aren't those of the experts that the placement names."""
    world = context.world()
    layer = MoEConfig(E, K, 128, 128, bias=True, weight_format=weight_format)
    torch.manual_seed(0)
    full = random_experts(layer, E, world.device)
    slots = (*reversed(range(E)), *range(E - 2), 0, EMPTY)
    placement = ExpertPlacement(E, world.parallel, slots)
    found = redistribute(world, full.map(lambda tensor: tensor[share(context)]), placement)
    wanted = full.map(lambda tensor: tensor[list(placement.shard(world.rank).experts)])
    pairs = [
        (f"{side}.{name}", getattr(found, side).tensors()[name], tensor)
        for side in ("gate_up", "down")
        for name, tensor in getattr(wanted, side).tensors().items()
    ]
    pairs += [(name, getattr(found, name), getattr(wanted, name)) for name in ("gate_up_bias", "down_bias")]
    return [name for name, mine, theirs in pairs if not torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))]


def scales_missing_on_one_rank(context: Any) -> list[dict[str, bool]]:
    """Which input scales an NVFP4 layer has, built and loaded anew, if calibration never met an expert of rank 1's."""
    world, layer = context.world(timeout_s=10.0), MoEConfig(E, K, 128, 128, weight_format="nvfp4")
    torch.manual_seed(0)
    full = random_experts(layer, E, world.device).map(lambda tensor: tensor[share(context)])
    given = full if context.rank == 0 else replace(full, down=replace(full.down, input_scale=None))
    placement = ExpertPlacement(E, world.parallel, (*reversed(range(E)),))
    found: list[dict[str, bool]] = []

    def built(_: Any, experts: Any) -> Any:
        placed(experts)
        return Mock(world=world, placement=placement, load_experts=placed)

    def placed(experts: Any, **_: Any) -> None:
        redistribute(world, experts, placement)
        found.append({name: getattr(experts, name).input_scale is not None for name in ("gate_up", "down")})

    binding = SimpleNamespace(name="experts", number=0, world=world, config=layer)
    layout = ParameterLayout(Mock(), lambda _: (given.gate_up, given.down))
    bound = BoundLayer(Mock(build=built, unfinished=[]), cast("Any", binding))
    bound.parameters = ("w2_weight",)
    engines = torch.nn.Module()
    for _ in range(2):
        engines.w2_weight = torch.nn.Parameter(torch.ones(E), requires_grad=False)
        with mock.patch.object(bound.received, "experts", return_value=range(E // 2)):
            bound.load(engines, layout, interleaved=False)
        given = full  # an update has all of them
    return found


def left(context: Any, strict: bool, unfit: str = "") -> tuple[str, dict[str, list[str]]]:
    """What making a layer comes to under a flag that eprt can't follow, or in a vLLM that it doesn't fit, and the
    reasons that were noted."""
    options = {"eprt": {"strict": True}} if strict else {}
    with plugin(context, config(parallel_config__enable_eplb=not unfit, additional_config=options), unfit) as vllm:
        return message(lambda: made(vllm, context, "layers.0")), vllm.state.fallbacks
