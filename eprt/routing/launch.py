"""Launches the routing kernels: chooses the router GEMM's tiling for T tokens, and compiles both kernels once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
import triton.language as tl

from eprt.config import GROUP_BEST, Routing
from eprt.launching import CachedKernel
from eprt.rounding import ceil_div, next_power_of_2
from eprt.routing.kernels import METHODS, choice_kernel, logits_kernel
from eprt.tokens import TopK, aligned

MAX_EXPERTS = 1024  # a warp holds a token's scores, 32 a thread
MAX_TOP_K = 64
SHARED_BYTES = 200 << 10  # of an SM, for tiles in flight
PROGRAMS = 132  # to aim at by split-K: one for each of an H200's SMs
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Tiling(NamedTuple):
    """The router GEMM's tiling for up to `max_tokens` tokens: the tile's tokens, experts and columns, and the warps and
    pipeline stages of the program that computes it."""

    max_tokens: int
    block_t: int
    block_e: int
    block_h: int
    warps: int
    stages: int


# From sweeps over the shapes of `eprt bench router` and Nemotron-H's (512 experts, 22 a token) on one H200.
TILINGS = (
    Tiling(16, 16, 32, 512, 4, 1),
    Tiling(32, 32, 64, 512, 8, 1),
    Tiling(64, 64, 32, 128, 4, 3),
    Tiling(128, 64, 64, 128, 4, 4),
    Tiling(256, 64, 64, 128, 4, 4),
    Tiling(512, 64, 64, 128, 4, 4),
    Tiling(1024, 64, 64, 128, 4, 4),
    Tiling(2048, 64, 128, 128, 4, 3),
    Tiling(4096, 128, 128, 64, 8, 4),
    Tiling(8192, 128, 128, 64, 8, 4),
    Tiling(1 << 62, 128, 128, 64, 8, 4),
)
_MOST_TOKENS = [tiling.max_tokens for tiling in TILINGS]
# Registers that let a warp have all pieces of a logit in flight; more warps a token were slower.
CHOICE_REGISTERS = 168


class Rounding(NamedTuple):
    """The dtypes a model rounds to: logits to `logits`, what its method computes to `method`, weights to `weights`.

    `grouped_sigmoid` and `grouped_softmax` compute in float32 whatever `method` is.
    """

    logits: torch.dtype
    method: torch.dtype
    weights: torch.dtype = torch.float32


class Choice(NamedTuple):
    """The specialization of a choice kernel.

    Attributes:
        routing: None: the kernel writes the logits, in `rounding.method`.
        pieces, bias, correction, token_ids, table, padding: dtypes of its inputs, None where there is none.
        splits: partial sums over H that it adds up.
    """

    device: torch.device
    routing: Routing | None
    top_k: int
    num_experts: int
    rounding: Rounding
    pieces: torch.dtype
    splits: int = 1
    bias: torch.dtype | None = None
    correction: torch.dtype | None = None
    token_ids: torch.dtype | None = None
    table: torch.dtype | None = None
    padding: torch.dtype | None = None


@cache
def prepared_choice(what: Choice) -> CachedKernel:
    """Returns the kernel of this choice, compiled at the first call for it."""
    routing = what.routing or Routing("topk_softmax")
    E, K, best = what.num_experts, what.top_k, GROUP_BEST.get(routing.method)
    groups = 1 if best is None else routing.num_groups
    computed = what.rounding.method if best is None or what.routing is None else torch.float32
    for_choice = computed if what.correction is None else torch.promote_types(computed, what.correction)
    outputs = (computed, None, None) if what.routing is None else (None, torch.int32, torch.float32)
    constants: dict[str, Any] = {"E": E, "K": K, "K_PAD": next_power_of_2(K), "SPLITS": what.splits}
    constants |= {"METHOD": "logits" if what.routing is None else routing.method}
    constants |= {"GROUPS": groups, "GROUPS_PAD": next_power_of_2(groups), "SIZE_PAD": next_power_of_2(E // groups)}
    constants |= {"TOP_GROUPS": routing.topk_groups, "GROUP_BEST": best or 0}
    constants |= {"RENORMALIZE": routing.renormalize, "SCALING": float(routing.scaling_factor)}
    constants |= {"LOGITS_DTYPE": _DTYPES[what.rounding.logits], "METHOD_DTYPE": _DTYPES[computed]}
    constants |= {"CHOICE_DTYPE": _DTYPES[for_choice], "WEIGHTS_DTYPE": _DTYPES[what.rounding.weights]}
    return CachedKernel(
        choice_kernel,
        what.device,
        (what.pieces, what.bias, what.correction, what.token_ids, what.table, what.padding, *outputs, 2, 2),
        constants,
        pdl=True,
        num_warps=1,
        maxnreg=CHOICE_REGISTERS,
        debug=routing.method == "hash",  # a wrong token id must not read another row: it traps, as indexing does
        sanitize_overflow=False,
    )


def knows(routing: Routing, top_k: int, num_experts: int, *dtypes: torch.dtype | None) -> bool:
    """Returns whether the choice kernel has this method, these sizes and logits or biases of these dtypes."""
    known = routing.method in METHODS and num_experts <= MAX_EXPERTS and top_k <= MAX_TOP_K
    return known and all(dtype is None or dtype in _DTYPES for dtype in dtypes)


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _dtype(tensor: torch.Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def choose(logits: torch.Tensor, routing: Routing, top_k: int, *given: torch.Tensor | None) -> TopK:
    """Computes `route_torch` in one launch, for what it `knows`; `given` are its last three arguments."""
    E, dtype = logits.shape[1], logits.dtype
    tensors = (*map(_contiguous, given), None, None, None)[:3]
    if routing.method != "hash":
        tensors = (tensors[0], None, None)
    what = Choice(logits.device, routing, top_k, E, Rounding(dtype, dtype), dtype, 1, None, *map(_dtype, tensors))
    return _choose(prepared_choice(what), aligned(logits), logits.shape[0], top_k, None, *tensors, None)


def _choose(kernel: CachedKernel, pieces: torch.Tensor, T: int, top_k: int, *given: torch.Tensor | None) -> TopK:
    """Launches a choice; `given` are bias, correction bias, token ids, their table, and padding."""
    ids = torch.empty((T, top_k), dtype=torch.int32, device=pieces.device)
    weights = torch.empty((T, top_k), dtype=torch.float32, device=pieces.device)
    if T:
        vocabulary = 0 if (table := given[3]) is None else table.shape[0]
        kernel((T, 1, 1), pieces, *given, None, ids, weights, T, vocabulary)
    return TopK(ids, weights)


class FusedRouter:
    """The GEMM and the choice of experts of one router on one GPU, for bf16 hidden states.

    Logits are float32 sums of exact products, where a float32 weight is three bf16 numbers. So they differ from those
    of a float32 GEMM by what the order of additions changes, and the choice where two scores are closer than that:
    tests hold both to float64.

    Args:
        weight: [E, H] bf16, or float32 with float32 logits; read at each call if it is contiguous and at a multiple of
            16 bytes, else copied now. The other tensors as in `routing.Router`, contiguous copies too.

    Attributes:
        copies: whether any was copied.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        routing: Routing,
        top_k: int,
        rounding: Rounding,
        bias: torch.Tensor | None = None,
        correction_bias: torch.Tensor | None = None,
        token_table: torch.Tensor | None = None,
    ) -> None:
        self.device = weight.device
        self._weight = aligned(weight)
        self._shape = (weight.shape[0], weight.shape[1])
        self._bias, self._correction, self._table = map(_contiguous, (bias, correction_bias, token_table))
        self.copies = any(self._copied(weight, bias, correction_bias, token_table))
        self._top_k, self._dtype = top_k, rounding.method
        self._gemms: dict[int, LogitsGemm] = {}  # by the number of the tiling
        self._choices: dict[tuple[int, torch.dtype | None, torch.dtype | None], CachedKernel] = {}
        kinds = map(_dtype, (self._bias, self._correction, None, self._table))
        self._what = Choice(self.device, routing, top_k, self._shape[0], rounding, torch.float32, 0, *kinds)

    def reread(self, weight: torch.Tensor, *others: torch.Tensor | None) -> None:
        """Brings what was copied of the tensors up to date where it lies, so that graphs read it, too.

        Args:
            weight, others: weight, bias, correction bias and token table that it was made of, with other values.
        """
        now = aligned(weight), *map(_contiguous, others)
        with torch.inference_mode():  # which writes tensors that were made in it or outside
            for held, new in self._copied(*now):
                held.copy_(new)

    def _copied(self, *given: torch.Tensor | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields (what is read, the tensor) of the given ones that aren't read themselves."""
        for held, tensor in zip((self._weight, self._bias, self._correction, self._table), given, strict=True):
            if held is not None and tensor is not None and held.data_ptr() != tensor.data_ptr():
                yield held, tensor

    def topk(self, hidden: torch.Tensor, token_ids: torch.Tensor | None, padding: torch.Tensor | None = None) -> TopK:
        """Returns the TopK of hidden states [T, H] bf16 (and token ids [T] for `hash`), both checked. Tokens that
        `padding` [T or more] bool marks, contiguous, get E for an id: no expert."""
        T = hidden.shape[0]
        token_ids = None if self._table is None else _contiguous(token_ids)
        pieces = self._pieces(hidden)
        kernel = self._choice(pieces.shape[0], _dtype(token_ids), _dtype(padding))
        return _choose(kernel, pieces, T, self._top_k, self._bias, self._correction, token_ids, self._table, padding)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits [T, E] of hidden states [T, H] bf16 that `topk` chooses by."""
        T = hidden.shape[0]
        logits = torch.empty((T, self._shape[0]), dtype=self._dtype, device=self.device)
        pieces = self._pieces(hidden)
        if T:
            kernel = prepared_choice(self._logits_of(pieces.shape[0]))
            kernel((T, 1, 1), pieces, self._bias, None, None, None, None, logits, None, None, T, 0)
        return logits

    def warmup(self, max_tokens: int, *, logits: bool, padding: bool = False) -> None:
        """Compiles everything that calls of up to `max_tokens` tokens need, `logits` too if asked for; with `padding`
        also those that mark some."""
        for number, most in enumerate(_MOST_TOKENS):
            gemm = self._gemm(number)
            gemm.kernel.load()
            for dtype in (None,) if self._table is None else (torch.int32, torch.int64):
                for marks in (None, torch.bool) if padding else (None,):
                    self._choice(gemm.splits, dtype, marks).load()
            if logits:
                prepared_choice(self._logits_of(gemm.splits)).load()
            if most >= max_tokens:
                return

    def _pieces(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns partial sums [splits, T, E] of the logits."""
        T = hidden.shape[0]
        gemm = self._gemm(bisect_left(_MOST_TOKENS, T))
        pieces = torch.empty((gemm.splits, T, self._shape[0]), dtype=torch.float32, device=self.device)
        if T:
            gemm.kernel((ceil_div(T, gemm.block_t) * gemm.programs, 1, 1), aligned(hidden), self._weight, pieces, T)
        return pieces

    def _gemm(self, number: int) -> LogitsGemm:
        found = self._gemms.get(number)
        if found is None:
            weight = self._weight.dtype
            found = self._gemms[number] = prepared_gemm(self.device, *self._shape, weight, TILINGS[number])
        return found

    def _choice(self, splits: int, token_ids: torch.dtype | None, padding: torch.dtype | None) -> CachedKernel:
        key = (splits, token_ids, padding)
        found = self._choices.get(key)
        if found is None:
            what = self._what._replace(splits=splits, token_ids=token_ids, padding=padding)
            found = self._choices[key] = prepared_choice(what)
        return found

    def _logits_of(self, splits: int) -> Choice:
        return self._what._replace(routing=None, top_k=1, correction=None, table=None, splits=splits)


class LogitsGemm(NamedTuple):
    """The router GEMM of one weight's shape and one tiling: for every `block_t` tokens it takes `programs` programs,
    which leave `splits` partial sums over H."""

    kernel: CachedKernel
    block_t: int
    programs: int
    splits: int


@cache
def prepared_gemm(device: torch.device, E: int, H: int, weight: torch.dtype, tiling: Tiling) -> LogitsGemm:
    """Returns the GEMM of this shape, compiled at the first call for it and shared by all layers' routers.

    Its blocks are no larger than the weight, and half as many columns if that is float32, which registers hold while it
    is taken apart. It splits H so often that there are about PROGRAMS programs, and has as many pipeline stages as an
    SM's shared memory holds.
    """
    wide = weight == torch.float32
    block_t, block_e = tiling.block_t, min(tiling.block_e, max(16, next_power_of_2(E)))
    block_h = min(tiling.block_h // 2 if wide else tiling.block_h, max(16, next_power_of_2(H)))
    blocks = ceil_div(H, block_h)
    tiles = ceil_div(tiling.max_tokens, block_t) * ceil_div(E, block_e)
    steps = ceil_div(blocks, max(1, min(PROGRAMS // tiles, blocks)))
    splits = ceil_div(blocks, steps)
    stage, taken_apart = (block_t + block_e * weight.itemsize // 2) * block_h * 2, 6 * wide * block_e * block_h
    constants = {"E": E, "H": H, "SPLITS": splits, "STEPS": steps}
    constants |= {"BLOCK_T": block_t, "BLOCK_E": block_e, "BLOCK_H": block_h}
    kernel = CachedKernel(
        logits_kernel,
        device,
        (torch.bfloat16, weight, torch.float32, 2),
        constants,
        pdl=True,
        num_warps=tiling.warps,
        num_stages=max(1, min(tiling.stages, (SHARED_BYTES - taken_apart) // stage)),
    )
    return LogitsGemm(kernel, block_t, ceil_div(E, block_e) * splits, splits)
