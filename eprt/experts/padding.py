"""Padding and stacking of expert matrices, as pure functions. No kernel library is needed.

A stack of expert matrices is `[n, parts * rows, cols]`: gate over up (or up alone), as in `eprt.weights`. The kernels
split its rows in the middle, so every half is padded on its own: padding the stack as a whole would move the boundary
between gate and up. Columns may be packed (bytes of two codes, scales of a block): sizes are the tensor's own.

Zero padding is neutral for every format: a zero code is 0 whatever its scale, so a padded gate row gives
swiglu(0, 0) = 0 or relu2(0) = 0, and a padded column multiplies that 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from eprt.tokens import as_bytes

TILE = 128  # rows and columns of the smallest tile that both Hopper executors' kernels accept


def pad_parts(
    stack: torch.Tensor, parts: int, rows: int, cols: int | None = None, *, reverse: bool = False
) -> torch.Tensor:
    """Pads each part of a stack to `rows` rows and `cols` columns with zeros; `reverse` swaps gate and up.

    Args:
        stack: [n, parts * r, c] with r <= rows and c <= cols, or a bias [n, parts * r].
        cols: None keeps the columns.

    Returns:
        [n, parts * rows, cols] (a bias stays [n, parts * rows]), contiguous, same dtype and device; never the memory
        of `stack`, which libraries that reorder in place would spoil.
    """
    if stack.dim() == 2:
        return pad_parts(stack[..., None], parts, rows, reverse=reverse)[..., 0]
    n, height, width = stack.shape
    halves = as_bytes(stack).view(n, parts, height // parts, width)
    if reverse:
        halves = halves.flip(1)
    padded = halves.new_zeros((n, parts, rows, width if cols is None else cols))  # byte 0 is the 0 of every format
    padded[:, :, : height // parts, :width] = halves
    return padded.flatten(1, 2).view(stack.dtype)


def interleave_halves(matrix: torch.Tensor, group: int) -> torch.Tensor:
    """Reorders [a; b] to a[0:group], b[0:group], a[group:], b[group:], ... The halves must be multiples of `group`."""
    L, total, width = matrix.shape
    return matrix.view(L, 2, total // (2 * group), group, width).transpose(1, 2).reshape(L, total, width)


def stack_experts(
    count: int, prepare: Callable[[int], dict[str, torch.Tensor]], spare: Mapping[str, int] | None = None
) -> dict[str, torch.Tensor]:
    """Prepares experts one by one into stacks, so that only one expert's temporaries exist beside the result.

    Args:
        count: L.
        prepare: expert index -> named tensors with leading dimension 1, of the same shapes for every expert.
        spare: how many rows (last dimensions) of zeros lie after a stack, for kernels that read past its end.

    Returns:
        The same names with leading dimension L. L = 1 copies too: the result never aliases the checkpoint.
    """
    stacks: dict[str, torch.Tensor] = {}
    for index in range(count):
        for name, piece in prepare(index).items():
            if index == 0:
                size = count * piece.numel()
                memory = piece.new_empty(size + (spare or {}).get(name, 0) * piece.shape[-1])
                memory[size:] = 0
                stacks[name] = memory[:size].view(count, *piece.shape[1:])
            stacks[name][index : index + 1].copy_(piece)
    return stacks
