"""Where the Blackwell kernels of FlashInfer expect every weight row and block scale: pure functions.

Sources, all of FlashInfer 0.7.2: `cute_dsl/utils.py` (6-D scale layout), the CuteDSL gather GEMM's docstring (64-row
groups), `fused_moe/core.py` and `utils.py` (row order of TRTLLM-Gen). Each function moves bytes only.
Matrices are [L, rows, cols]; rows of a gated first matrix arrive as [gate; up].
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from eprt.experts.padding import pad_parts
from eprt.rounding import round_up
from eprt.tokens import as_bytes

SCALE_ROWS, SCALE_COLS = 128, 4  # one tile of block scales: 128 rows of 4 scales, 512 bytes
SHUFFLE_ROWS = 32  # TRTLLM-Gen permutes rows inside blocks of 32 (its epilogue tile of 128 rows)


def widen(tensor: torch.Tensor, cols: int, rows: int | None = None) -> torch.Tensor:
    """Pads with zeros to [..., rows, cols]; rows None keeps the rows."""
    more = (rows or tensor.shape[-2]) - tensor.shape[-2]
    if tensor.shape[-1] == cols and not more:
        return tensor
    return pad(as_bytes(tensor), (0, cols - tensor.shape[-1], 0, more)).view(tensor.dtype)


def swizzle_scales(scales: torch.Tensor) -> torch.Tensor:
    """Puts block scales [L, rows, cols] in the tensor cores' order: tiles of 128 x 4, row 32 i + r of a tile at byte
    16 r + 4 i. Zero-padded to whole tiles: [L, rows up to 128, cols up to 4]."""
    L, rows, cols = scales.shape
    if rows % SCALE_ROWS or cols % SCALE_COLS:
        rows, cols = round_up(rows, SCALE_ROWS), round_up(cols, SCALE_COLS)
        scales = pad_parts(scales, 1, rows, cols)
    tiles = scales.view(L, rows // 128, 4, 32, cols // 4, 4).permute(0, 1, 4, 3, 2, 5)
    return tiles.reshape(L, rows, cols)


def mma_scale_view(swizzled: torch.Tensor) -> torch.Tensor:
    """Returns CuteDSL's 6-D view of swizzled scales: (32, 4, row tiles, 4, column tiles, L), same memory."""
    L, rows, cols = swizzled.shape
    return swizzled.view(L, rows // 128, cols // 4, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)


def trtllm_row_order(rows: int, gated: bool, device: torch.device | None = None) -> torch.Tensor:
    """Returns int64 [rows]: which canonical row TRTLLM-Gen wants at each place of a matrix with `rows` rows.

    Gated first matrices alternate: row 2 i is up's i, row 2 i + 1 gate's i. Then, in every matrix, row r of each block
    of 32 moves to place 8 (r mod 4) + r // 4. `rows` must be a multiple of 32.
    """
    place = torch.arange(rows, device=device)
    source = place // SHUFFLE_ROWS * SHUFFLE_ROWS + place % 8 * 4 + place % SHUFFLE_ROWS // 8
    return source % 2 * -(rows // 2) + source // 2 + rows // 2 if gated else source


def take_rows(matrix: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Returns [L, rows, cols] with row `order[i]` at place i, whatever the dtype."""
    return as_bytes(matrix).index_select(1, order).view(matrix.dtype)
