"""The language that dispatchers and executors share.

Letters used everywhere: T local tokens, R agreed tokens a rank, W ranks, K top-k, E experts, L local experts,
H hidden size the experts see (a latent width in latent MoE), I intermediate size, N rows a rank received,
M rows reserved for each expert.

| format              | executor does                             | combine does                  |
|---------------------|-------------------------------------------|-------------------------------|
| `FlatTokens`        | applies weights, sums over K: row in, row out | sums a token's rows over ranks |
| `ExpertMajorTokens` | one output row per input row, **no** weights | applies weights, sums over K and ranks |

So each reduction has exactly one owner. `check()` tests what the fields' text says, without reading values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from eprt.config import PayloadFormat
from eprt.errors import InputError
from eprt.rounding import ceil_div
from eprt.weights import FP8_BLOCK, NVFP4_BLOCK


def _expect(ok: bool, message: str) -> None:
    if not ok:
        raise InputError(message)


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes instead of FP8, for operations that torch hasn't got for FP8 everywhere; wider dtypes as they are."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def aligned(rows: torch.Tensor) -> torch.Tensor:
    """`rows` if it is contiguous at a multiple of 16 bytes, which Triton's kernels are compiled for; else a copy."""
    rows = rows.contiguous()
    return rows if rows.data_ptr() % 16 == 0 else rows.clone()


@dataclass(frozen=True)
class TopK:
    """A routing decision for T local tokens.

    Attributes:
        ids: [T, K] int32, global expert ids in [0, E), or E (`invalid_expert_id`) for "no expert": such an
            entry computes nothing whatever its weight. Owned by the caller; read until combine returns.
        weights: [T, K] float32, finite; routed scaling already applied.
    """

    ids: torch.Tensor
    weights: torch.Tensor

    def check(self, top_k: int) -> None:
        """Raises InputError on a wrong shape, dtype or device. Reads no values."""
        ids, weights = self.ids, self.weights
        if not torch.is_tensor(ids) or not torch.is_tensor(weights):
            problem = f"TopK holds {type(ids).__name__} and {type(weights).__name__}: expected two tensors"
        elif ids.is_nested or weights.is_nested or not ids.layout == weights.layout == torch.strided:
            problem = f"topk_ids and topk_weights are {ids.layout} and {weights.layout}: expected dense tensors"
        elif ids.dim() != 2 or ids.shape[1] != top_k:
            problem = f"topk_ids is {_describe(ids)}: expected [T, {top_k}] (the config's top_k)"
        elif ids.dtype != torch.int32:
            problem = f"topk_ids is {_describe(ids)}: expected int32; use .to(torch.int32)"
        elif weights.shape != ids.shape:
            problem = f"topk_weights is {_describe(weights)}: expected the shape of topk_ids, {tuple(ids.shape)}"
        elif weights.dtype != torch.float32:
            problem = f"topk_weights is {_describe(weights)}: expected float32; use .float()"
        elif weights.device != ids.device:
            problem = f"topk_weights is on {weights.device}, topk_ids on {ids.device}: put both on one device"
        else:
            return
        raise InputError(problem)

    def check_ids(self, num_experts: int) -> None:
        """Raises InputError if an id lies outside [0, E]. Synchronises a GPU."""
        if self.ids.numel() == 0:
            return
        low, high = (int(v) for v in torch.aminmax(self.ids))
        _expect(
            low >= 0 and high <= num_experts,
            f"topk_ids spans [{low}, {high}]: expected [0, {num_experts}), or {num_experts} for 'no expert'",
        )

    def check_weights(self) -> None:
        """Raises InputError if a weight isn't finite. Synchronises a GPU."""
        bad = int((~torch.isfinite(self.weights)).sum())
        _expect(bad == 0, f"topk_weights holds {bad} non-finite values of {self.weights.numel()}: check the router")

    def narrow(self, start: int, length: int) -> TopK:
        return TopK(self.ids[start : start + length], self.weights[start : start + length])


@dataclass(frozen=True)
class RouterLogits:
    """Router output before the choice of experts: [T, E], any float dtype."""

    logits: torch.Tensor

    def narrow(self, start: int, length: int) -> RouterLogits:
        return RouterLogits(self.logits[start : start + length])


@dataclass(frozen=True)
class PayloadFacts:
    """Describes how numbers of a format travel.

    Attributes:
        dtype, packing: of `Payload.data`, and how many numbers one element holds.
        block, scale_dtype: how many numbers of a row share a scale (the last few may be fewer), and its dtype; 0 and
            None: no scales.
    """

    dtype: torch.dtype
    packing: int = 1
    block: int = 0
    scale_dtype: torch.dtype | None = None

    def data_bytes(self, hidden_size: int) -> int:
        """Returns the bytes of one token's numbers."""
        return hidden_size // self.packing * self.dtype.itemsize

    def scale_bytes(self, hidden_size: int) -> int:
        """Returns the bytes of one token's scales."""
        return 0 if self.scale_dtype is None else ceil_div(hidden_size, self.block) * self.scale_dtype.itemsize


PAYLOADS: dict[PayloadFormat, PayloadFacts] = {
    "f32": PayloadFacts(torch.float32),
    "bf16": PayloadFacts(torch.bfloat16),
    "fp8_block": PayloadFacts(torch.float8_e4m3fn, block=FP8_BLOCK, scale_dtype=torch.float32),
    "nvfp4": PayloadFacts(torch.uint8, packing=2, block=NVFP4_BLOCK, scale_dtype=torch.float8_e4m3fn),
}


@dataclass(frozen=True)
class Payload:
    """Hidden states as they travelled: plain numbers, or packed codes with their scales.

    Attributes:
        data: last dimension H for `f32`, `bf16` and `fp8_block` (e4m3), H/2 bytes for `nvfp4` (low nibble first).
        format: number format of `data`.
        scale: `fp8_block`: float32 [..., ceil(H/128)]; `nvfp4`: e4m3 [..., H/16], linear; else None.
        global_scale: `nvfp4`: float32 [1], the second-level factor: value = code * scale * global_scale; else None.
    """

    data: torch.Tensor
    format: PayloadFormat = "bf16"
    scale: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None

    @classmethod
    def plain(cls, data: torch.Tensor) -> Payload:
        return cls(data, "f32" if data.dtype == torch.float32 else "bf16")

    @property
    def hidden_size(self) -> int:
        return self.data.shape[-1] * PAYLOADS[self.format].packing

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Payload:
        """Returns the payload with data and scale changed alike."""
        return replace(self, data=change(self.data), scale=None if self.scale is None else change(self.scale))

    def check(self) -> None:
        """Raises InputError unless dtype and scale fit the format."""
        facts = PAYLOADS[self.format]
        _expect(
            self.data.dtype == facts.dtype, f"{self.format} payload is {_describe(self.data)}: expected {facts.dtype}"
        )
        if not facts.block:
            _expect(self.scale is None, f"{self.format} payload carries a scale: only packed formats have one")
            return
        groups = ceil_div(self.hidden_size, facts.block)
        _expect(
            self.scale is not None and self.scale.shape == (*self.data.shape[:-1], groups),
            f"{self.format} payload of {_describe(self.data)} needs a scale of shape "
            f"{(*self.data.shape[:-1], groups)}, got {None if self.scale is None else _describe(self.scale)}",
        )


@dataclass(frozen=True)
class FlatTokens:
    """One row per received token, with its routing.

    Attributes:
        hidden: payload with leading dimension [N]. Rows without a valid id are garbage.
        ids: [N, K] int32 **global** expert ids. An entry that isn't for this rank, or that holds no token, is E.
        weights: [N, K] float32; garbage where the id is E.
        num_experts: E, which is also the invalid id.
        every_row_read: combine reads all N output rows, so the executor must write zeros into rows that have no
            valid id. False: such rows need not be written at all.

    Owned by the dispatcher; valid until combine of the same handle returns.
    """

    hidden: Payload
    ids: torch.Tensor
    weights: torch.Tensor
    num_experts: int
    every_row_read: bool = False

    @property
    def num_rows(self) -> int:
        return self.ids.shape[0]

    def check(self) -> None:
        """Raises InputError unless shapes, dtypes and devices are as documented."""
        self.hidden.check()
        rows = self.hidden.data.shape[0]
        _expect(
            self.ids.dim() == 2 and self.ids.shape[0] == rows and self.ids.dtype == torch.int32,
            f"flat ids are {_describe(self.ids)}: expected [{rows}, K] int32",
        )
        _expect(
            self.weights.shape == self.ids.shape and self.weights.dtype == torch.float32,
            f"flat weights are {_describe(self.weights)}: expected {tuple(self.ids.shape)} float32",
        )
        _expect(
            self.hidden.data.device == self.ids.device == self.weights.device,
            f"flat tokens span devices {self.hidden.data.device}, {self.ids.device}, {self.weights.device}",
        )


@dataclass(frozen=True)
class ExpertMajorTokens:
    """M rows reserved for each local expert, as many of them valid as `counts` says.

    Attributes:
        hidden: payload with leading dimensions [L, M]. Rows of `data` may lie further apart than they are wide, where
            a transport carries a wider one; each is contiguous.
        counts: [L] int32, valid rows of each expert, on the tokens' device. Rows at and past `counts[e]` are garbage:
            never read by an executor, never required to be written.
        num_tokens: tokens of all ranks that this call allows (R x ranks), by which an executor chooses how to compute,
            never what; None: M of them.

    Owned by the dispatcher; valid until combine of the same handle returns.
    """

    hidden: Payload
    counts: torch.Tensor
    num_tokens: int | None = None

    @property
    def allowed_tokens(self) -> int:
        """`num_tokens`, or M where nobody said."""
        return self.hidden.data.shape[1] if self.num_tokens is None else self.num_tokens

    def check(self) -> None:
        """Raises InputError unless shapes, dtypes and devices are as documented."""
        self.hidden.check()
        _expect(
            self.hidden.data.dim() == 3, f"expert-major hidden is {_describe(self.hidden.data)}: expected [L, M, H]"
        )
        _expect(
            self.counts.shape == (self.hidden.data.shape[0],) and self.counts.dtype == torch.int32,
            f"expert-major counts are {_describe(self.counts)}: expected [{self.hidden.data.shape[0]}] int32",
        )


def merge_repeats(tokens: FlatTokens) -> FlatTokens:
    """Returns rows that name an expert once: its first entry keeps both weights, the other becomes invalid."""
    same = tokens.ids[:, :, None] == tokens.ids[:, None, :]
    repeat = same.tril(-1).any(dim=2)
    weights = torch.where(same, tokens.weights[:, None, :], 0.0).sum(dim=2)
    return replace(tokens, ids=torch.where(repeat, tokens.num_experts, tokens.ids), weights=weights)
