"""Token ids and tables of a routing method, and its choice as one row a token."""

from __future__ import annotations

import torch

from eprt.config import Routing
from support.stand_ins.kernel_device import DEVICE, generator

GROUPED = Routing("grouped_sigmoid", num_groups=8, topk_groups=4, scaling_factor=2.5)
V = 64


def extras(routing, E, K, with_bias, T):
    """correction bias, token ids and table, as far as the method takes them."""
    draw = generator(E + K)
    bias = torch.randn(E, generator=draw, device=DEVICE) * 0.2 if with_bias else None
    if routing.method != "hash":
        return bias, None, None
    table = torch.rand(V, E, generator=draw, device=DEVICE).argsort(dim=1)[:, :K].contiguous()
    return bias, torch.randint(V, (T,), generator=draw, device=DEVICE), table


def dense(topk, E):
    assert topk.ids.dtype == torch.int32
    assert topk.weights.dtype == torch.float32
    assert all(len(set(row)) == len(row) for row in topk.ids.tolist())
    return torch.zeros(len(topk.ids), E, device=topk.ids.device).scatter(1, topk.ids.long(), topk.weights)
