"""Jobs for test_vllm_plugin.py: the plugin's way through the stand-in, on the ranks of a gloo world."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from eprt.bench.experts import random_experts
from eprt.config import MoEConfig, WeightFormat
from eprt.integrations.vllm.placement import redistribute
from eprt.integrations.vllm.state import describe
from eprt.placement import EMPTY, ExpertPlacement
from support.stand_ins import vllm as stand_in

E, K, H, I = 8, 2, 32, 64
TOKENS = [3, 5]


def experts(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, 2I, H], [E, H, I] of all ranks."""
    generator = torch.Generator().manual_seed(layer)
    up = torch.randn(E, 2 * I, H, generator=generator).mul(0.2).bfloat16()
    return up, torch.randn(E, H, I, generator=generator).mul(0.2).bfloat16()


def tokens(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    T = TOKENS[rank]
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)])
    return torch.randn(T, H, generator=generator).bfloat16(), torch.rand(T, K, generator=generator), ids


def config(**sections: Any) -> Any:
    made = SimpleNamespace(
        parallel_config=SimpleNamespace(
            enable_eplb=False, use_ubatching=False, enable_elastic_ep=False, prefill_context_parallel_size=1
        ),
        model_config=SimpleNamespace(enforce_eager=True),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=16),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[]),
        lora_config=None,
        additional_config=None,
    )
    vars(made).update(sections)
    return made


def two_layers(context: Any) -> dict[str, Any]:
    """Made, loaded and called; then a layer loaded later, as a draft model's would be."""
    context.world()  # torch.distributed, as vLLM's own start-up leaves it
    share = slice(context.rank * E // context.size, (context.rank + 1) * E // context.size)
    found: dict[str, Any] = {"outputs": [], "padded": None}
    with stand_in.installed(config(), TOKENS) as vllm, torch.inference_mode():
        moe = stand_in.moe_config(E, K, H, I, context.size)

        def made(number: int, kind: type) -> Any:
            up, down = experts(number)
            mine = {"w13_weight": up[share], "w2_weight": down[share]}
            return vllm.routed(f"layers.{number}", moe, "silu", mine, kind)

        layers = [made(number, stand_in.UnquantizedFusedMoEMethod) for number in range(2)]
        found["classes"] = [type(layer.quant_method).__name__ for layer in layers]
        found["monolithic"] = layers[0].quant_method.is_monolithic
        found["ids"] = layers[0].quant_method.topk_indices_dtype
        for layer in layers:
            layer.quant_method.process_weights_after_loading(layer)
        found["left_in_vllm"] = sum(p.numel() for layer in layers for p in layer.parameters())
        found["cold"] = len(vllm.state.cold)
        x, weights, ids = tokens(context.rank)
        for layer in layers:
            found["outputs"].append(layer.quant_method.apply(layer, x, weights, ids, None, None).float())
        found["warm"] = (len(vllm.state.cold), vllm.state.worlds[False].warm)
        vllm.context.is_padding = torch.arange(16) >= 1  # all but the first row
        found["padded"] = layers[0].quant_method.apply(layers[0], x, weights, ids, None, None).float()
        vllm.context.is_padding = None
        late = made(2, stand_in.UnquantizedFusedMoEMethod)
        late.quant_method.process_weights_after_loading(late)
        found["outputs"].append(late.quant_method.apply(late, x, weights, ids, None, None).float())
        found["again"] = message(lambda: layers[0].quant_method.process_weights_after_loading(layers[0]))
        found["monolithic_call"] = message(lambda: layers[0].quant_method.apply_monolithic(layers[0], x, None))
        # vLLM's own: it chooses a kernel, which this machine doesn't have.
        found["left"] = message(lambda: made(3, stand_in.AutoGPTQMoEMethod))
        found["reasons"] = {reason: list(names) for reason, names in vllm.state.fallbacks.items()}
        moe = stand_in.moe_config(E, K, H, I, context.size, use_ep=False)
        found["no_ep"] = message(lambda: made(4, stand_in.UnquantizedFusedMoEMethod))
    return found


def placed(context: Any, path: str) -> dict[str, Any]:
    """A layer whose experts lie as the file says, though vLLM loads them in order; then layers that it doesn't fit."""
    context.world()
    share = slice(context.rank * E // context.size, (context.rank + 1) * E // context.size)
    options = config(additional_config={"eprt": {"placement": path}})
    with stand_in.installed(options, TOKENS) as vllm, torch.inference_mode():

        def made(name: str, experts_: int = E) -> Any:
            moe = stand_in.moe_config(experts_, K, H, I, context.size)
            up, down = experts(0)
            mine = {"w13_weight": up[share], "w2_weight": down[share]}
            return vllm.routed(name, moe, "silu", mine, stand_in.UnquantizedFusedMoEMethod)

        layer = made("model.layers.3.mlp.experts")
        layer.quant_method.process_weights_after_loading(layer)
        x, weights, ids = tokens(context.rank)
        output = layer.quant_method.apply(layer, x, weights, ids, None, None).float()
        built = layer.quant_method.eprt.layer
        return {
            "output": output,
            "slots": built.placement.slots,
            "held": built.placement.num_local_experts,
            "line": describe(vllm.state.bindings, 1),
            "no layer": message(lambda: made("model.layers.4.mlp.experts")),
            "no number": message(lambda: made("mlp.experts")),
            "other experts": message(lambda: made("model.layers.3.mlp.experts", 16)),
        }


def spread_experts(context: Any, weight_format: WeightFormat) -> list[str]:
    """Tensors of this rank's slots that aren't those of the experts that the placement names."""
    world = context.world()
    layer = MoEConfig(E, K, 128, 128, bias=True, weight_format=weight_format)
    torch.manual_seed(0)
    full = random_experts(layer, E, world.device)
    slots = (*reversed(range(E)), *range(E - 2), 0, EMPTY)
    placement = ExpertPlacement(E, world.parallel, slots)
    share = slice(context.rank * E // context.size, (context.rank + 1) * E // context.size)
    found = redistribute(world, full.map(lambda tensor: tensor[share]), placement)
    wanted = full.map(lambda tensor: tensor[list(placement.shard(world.rank).experts)])
    pairs = [
        (f"{side}.{name}", getattr(found, side).tensors()[name], tensor)
        for side in ("gate_up", "down")
        for name, tensor in getattr(wanted, side).tensors().items()
    ]
    pairs += [(name, getattr(found, name), getattr(wanted, name)) for name in ("gate_up_bias", "down_bias")]
    return [name for name, mine, theirs in pairs if not torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))]


def refused(context: Any) -> str:
    context.world()
    parallel = SimpleNamespace(
        enable_eplb=True, use_ubatching=False, enable_elastic_ep=False, prefill_context_parallel_size=1
    )
    with stand_in.installed(config(parallel_config=parallel), TOKENS) as vllm:
        moe = stand_in.moe_config(E, K, H, I, context.size)
        return message(lambda: vllm.routed("layers.0", moe, "silu", {}, stand_in.UnquantizedFusedMoEMethod))


def message(call: Any) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test reads which one it was
        return f"{type(error).__name__}: {error}"
    return "nothing raised"
