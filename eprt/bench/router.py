"""Measures routers on one GPU: rows for `eprt bench router`.

The kernels stand beside the plain torch code of `eprt.routing`, in the same run and on the same numbers. Times are of
CUDA graphs of calls that each read another router's weight, more of them than the L2 cache holds, as the layers of a
model do. The lower bounds: bytes of the weight and the hidden states over the copy bandwidth measured in the same run,
and operations over the bf16 rate of a large matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch

from eprt.bench.experts import VOCABULARY, Ceilings, cuda_device, random_router
from eprt.bench.report import Report, Row
from eprt.bench.shapes import require_shapes
from eprt.config import MoEConfig
from eprt.models.published import published_layer
from eprt.routing import Router, route_torch
from eprt.timing import device_microseconds, host_microseconds
from eprt.tokens import TopK

CACHE_BYTES = 96 << 20  # more than any GPU's L2 so far
MOST_ROUTERS = 64
HOST_CALLS = 200

SHAPES: dict[str, MoEConfig] = {
    name.lower(): published_layer(name)
    for name in ("gpt-oss-120b", "Qwen3-30B-A3B", "DeepSeek-V3", "DeepSeek-V4-Flash")
}
SHAPES["deepseek-v4-flash-hash"] = published_layer("DeepSeek-V4-Flash", 0)


def router_report(
    shapes: Collection[str] = SHAPES, *, tokens: Sequence[int], keep: Callable[[Report], None] = lambda _: None
) -> Report:
    """Measures routers of random weights on this GPU; `keep` sees what was found so far.

    Raises:
        ConfigError: an unknown shape, or no CUDA device.
    """
    require_shapes(shapes, SHAPES)
    device = cuda_device("router")
    ceilings = Ceilings.measure(device)
    report = Report("router", [], ceilings.as_dict())
    for name in shapes:
        routers = _routers(SHAPES[name], device)
        routers[0].warmup(max(tokens))
        for count in tokens:
            report.rows.extend(_rows(name, routers, count, ceilings))
            keep(report)
    return report


def _routers(config: MoEConfig, device: torch.device) -> list[Router]:
    """Makes more routers than the L2 cache holds weights of, or as many as a graph of moderate size calls."""
    torch.manual_seed(config.num_experts + config.hidden_size)
    weight_bytes = config.num_experts * config.hidden_size * 2
    return [random_router(config, device) for _ in range(min(MOST_ROUTERS, CACHE_BYTES // weight_bytes + 1))]


def _rows(name: str, routers: list[Router], T: int, ceilings: Ceilings) -> list[Row]:
    """Returns one row for the kernels and one for torch."""
    E, H = routers[0].weight.shape
    device = routers[0].weight.device
    generator = torch.Generator(device).manual_seed(T)
    hidden = torch.randn(T, H, generator=generator, device=device).to(torch.bfloat16)
    token_ids = None
    if routers[0].token_table is not None:
        token_ids = torch.randint(VOCABULARY, (T,), generator=generator, device=device)
    bounds = {
        "weights_us": round(2 * (E + T) * H / ceilings.copy_bytes * 1e6, 2),
        "flops_us": round(2 * T * E * H / ceilings.bf16_flops * 1e6, 2),
    }
    rows: list[Row] = []
    for who, choose in (("eprt", Router.__call__), ("torch", _by_torch)):
        calls = [partial(choose, router, hidden, token_ids) for router in routers]
        us = device_microseconds(*calls, repeats=1, rounds=7)
        host_us = host_microseconds(calls[0], HOST_CALLS)
        times = {"us": round(us, 2), "host_us": round(host_us, 1)}
        rows.append({"shape": name, "router": who, "tokens": T, **times, **bounds})
    return rows


def _by_torch(router: Router, hidden: torch.Tensor, token_ids: torch.Tensor | None) -> TopK:
    logits = router.logits_by_torch(hidden).logits
    return route_torch(logits, router.routing, router.top_k, router.correction_bias, token_ids, router.token_table)
