"""Jobs of test_payload_scale.py: NVFP4 tokens through dispatchers and whole layers."""

from __future__ import annotations

from dataclasses import replace

import torch

from eprt.config import MoEConfig, RuntimeConfig
from eprt.conformance.cases import Batch
from eprt.conformance.oracle import expected_outputs, full_weights, layer_of, relative_error
from eprt.dispatch import make_dispatcher
from eprt.errors import EprtError
from eprt.experts.reference import decode_hidden
from eprt.quant import encode_payload
from eprt.tokens import TopK
from support.jobs.sm100_jobs import executors_on_cpu

CONFIG = MoEConfig(num_experts=8, top_k=3, hidden_size=256, intermediate_size=64, weight_format="nvfp4")
PACKED = RuntimeConfig(payload="nvfp4", max_tokens_per_rank=64)


def agree(context, scales, payloads=("nvfp4", "nvfp4")):
    """The dispatcher's scale (None if it has none) after an empty dispatch, or the error's type and text."""
    own = scales[context.rank]
    runtime = replace(PACKED, payload=payloads[context.rank])
    own = None if own is None else torch.tensor([own])
    try:
        dispatcher = make_dispatcher("none", context.world(), CONFIG, runtime, input_scale=own)
        sent = dispatcher.dispatch(torch.zeros(0, 256), TopK(torch.zeros(0, 3).int(), torch.zeros(0, 3)))
        dispatcher.combine(torch.zeros(sent.tokens.num_rows, 256), sent.handle)
    except EprtError as error:
        return type(error).__name__, str(error)
    return None if dispatcher.payload_scale is None else dispatcher.payload_scale.tolist()


def tokens(rank, size):
    """Gaussian bf16 tokens, one channel of 32 eight times as large, as trained models have; times `size`."""
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(20 + rank, CONFIG.hidden_size, generator=generator)
    hidden[:, ::32] *= 8
    ids = torch.rand(len(hidden), CONFIG.num_experts, generator=generator).argsort(1)[:, : CONFIG.top_k]
    weights = torch.rand(ids.shape, generator=generator) + 0.25
    return Batch((hidden * size).bfloat16(), TopK(ids.to(torch.int32), weights))


def weights_of(calibrated_for):
    """All experts. Calibrated: expert e for (e + 1) / E of the largest value, so that ranks hold different scales."""
    full = full_weights(CONFIG)
    if calibrated_for is None:
        return full
    share = torch.arange(1, CONFIG.num_experts + 1)[:, None] / CONFIG.num_experts
    scale = (share * calibrated_for / (6 * 448)).expand(-1, 2).contiguous()
    return replace(full, gate_up=replace(full.gate_up, input_scale=scale))


def layer_errors(context, pair, executor, size=1.0, calibrated=True, mutation=""):
    """Of this rank's output with NVFP4 tokens: relative to the same layer's with bf16 tokens, and to the oracle on
    the numbers that one scale for all ranks makes of them."""
    world = context.world()
    batch = tokens(world.rank, size)
    largest = max(float(tokens(rank, size).hidden.abs().max()) for rank in range(world.size))
    full = weights_of(largest if calibrated else None)
    outputs = {}
    for payload in ("nvfp4", "bf16"):
        runtime = replace(PACKED, payload=payload, dispatcher=pair[0], token_format=pair[1], executor=executor)
        layer = layer_of(world, CONFIG, full, runtime)
        if payload == "nvfp4":
            _mutate(layer, mutation, full)
        outputs[payload] = layer(batch.hidden, batch.topk)
        layer.close()
    scale = torch.tensor([largest / (6 * 448) if calibrated else 1.0])
    travelled = decode_hidden(encode_payload(batch.hidden, "nvfp4", scale))
    expected = expected_outputs(CONFIG, full, [Batch(travelled, batch.topk)])[0]
    return relative_error(outputs["nvfp4"], outputs["bf16"]), relative_error(outputs["nvfp4"], expected)


def blackwell_errors(context, **given):
    """`layer_errors` with the Blackwell executors on stand-ins, which are calibrated for another scale."""
    with executors_on_cpu():
        return layer_errors(context, **given)


def _mutate(layer, mutation, full):
    if mutation == "scale dropped on arrival":
        whole = layer.executor

        def without_scale(received, out=None):
            hidden = replace(received.hidden, global_scale=torch.ones(1))
            return whole(replace(received, hidden=hidden), out=out)

        layer.executor = without_scale
    elif mutation == "a scale for each rank":
        shard = layer.dispatcher.shard
        own = full.gate_up.input_scale[shard.first_expert : shard.end_expert]
        layer.dispatcher.payload_scale = own.amax().view(1)
