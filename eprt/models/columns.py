"""Columns in activation order (GPTQ's `desc_act`, compressed-tensors' `actorder: group`): sorted by group at load.

GPTQ gives groups to a matrix's inputs from the most to the least active one; `g_idx` says which column has which.
Executors multiply group by group, so that the columns of a group have to be neighbours.
"""

from __future__ import annotations

import torch

from eprt.errors import CheckpointError
from eprt.quant.elements import pack_nibbles, unpack_nibbles
from eprt.weights import Int4


def column_order(groups: torch.Tensor, size: int, where: str) -> torch.Tensor:
    """Returns columns sorted by their group, int64. Raises CheckpointError unless each group has `size` of them (0: all
    are one group)."""
    cols = groups.numel()
    size = size or cols
    order = torch.argsort(groups, stable=True)
    expected = torch.arange(cols, dtype=groups.dtype) // size
    if not torch.equal(groups[order], expected):
        place = int((groups[order] != expected).nonzero()[0])
        found = int(groups[order][place])
        raise CheckpointError(
            f"{where}: {int((groups == found).sum())} columns are of group {found}: expected {size} in each of the "
            f"groups 0 to {(cols - 1) // size}"
        )
    return order


def is_sorted(orders: torch.Tensor) -> bool:
    """Tells whether all orders [..., cols] leave columns where they are."""
    return bool((orders == torch.arange(orders.shape[-1])).all())


def sort_columns(matrix: Int4, orders: torch.Tensor) -> None:
    """Sorts, in place, the columns of each part of each expert by `orders` [L, parts, cols]. Scales stay: they have an
    entry for a group."""
    for parts, of_parts in zip(matrix.codes.unflatten(1, (orders.shape[1], -1)), orders, strict=True):
        for codes, order in zip(parts, of_parts, strict=True):
            codes.copy_(pack_nibbles(unpack_nibbles(codes)[:, order]))


def sort_rows(matrix: Int4, orders: torch.Tensor, parts: int) -> None:
    """Sorts, in place, the rows of both parts of each expert by `orders` [L, rows of one part]: the outputs of gate and
    up, as the next matrix takes them."""
    for tensor in matrix.tensors().values():
        for of_expert, order in zip(tensor.unflatten(1, (parts, -1)), orders, strict=True):
            of_expert.copy_(of_expert[:, order])
