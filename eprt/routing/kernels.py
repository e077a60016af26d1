"""Routes on a GPU in two launches. `logits_kernel` is a split-K GEMM in which every SM reads its part of the weight.
`choice_kernel` has one warp per token: it adds the partial sums in order, rounds where the model rounds and chooses.

Which expert comes first is decided on the bits of the scores: NaN before infinity, as in `torch.topk`, both zeros
alike, and of equal scores the lowest expert first. `torch.topk` leaves that order open.
"""
# Triton's language isn't typed: its values are tensors of the kernel, whatever a checker makes of them.
# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Of eprt.config.RoutingMethod; the others are left to torch.
METHODS = (
    "softmax_topk", "topk_softmax", "topk_sigmoid", "grouped_sigmoid", "grouped_softmax", "sqrt_softplus", "hash",
)  # fmt: skip

_EPSILON = tl.constexpr(1e-20)  # both as in eprt.routing.formulas
_NORM_MIN = tl.constexpr(1e-12)
_TAKEN = tl.constexpr(-(2**31))  # below every score's key
_NAN = tl.constexpr(2**31 - 1)  # above every score's key


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """Rounds float32 as a tensor of `dtype` would hold it."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def _divide(x, y):
    """Rounds to nearest, as torch does; `/` alone is approximate."""
    return tl.div_rn(x, tl.zeros_like(x) + y)


@triton.jit
def _key(x):
    """Returns an integer that orders as the score does."""
    bits = x.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(key == -1, 0, key)  # -0
    return tl.where(x != x, _NAN, key)


@triton.jit
def _score(key):
    """Inverts `_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _first_of_best(key, position, END: tl.constexpr, AXIS: tl.constexpr):
    """Returns the largest key and the lowest position that has it."""
    best = tl.max(key, AXIS, keep_dims=True)
    return best, tl.min(tl.where(key == best, position, END), AXIS, keep_dims=True)


@triton.jit
def _best_groups(key, g, i, TOP_GROUPS: tl.constexpr, GROUPS: tl.constexpr, BEST: tl.constexpr):
    """Tells [GROUPS_PAD, 1] whether fewer than TOP_GROUPS are better; a group counts as its best one or two, added."""
    best, first = _first_of_best(key, i, key.shape[1], 1)
    if BEST == 2:
        second = tl.max(tl.where(i == first, _TAKEN, key), 1, keep_dims=True)
        best = _key(_score(best) + _score(second))
    own = tl.where(g < GROUPS, best, _TAKEN)
    other, h = tl.trans(own), tl.trans(g)
    better = (other > own) | ((other == own) & (h < g))
    return tl.sum(better.to(tl.int32), 1, keep_dims=True) < TOP_GROUPS


@triton.jit
def _sigmoid(x):
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + libdevice.exp(-x))


@triton.jit
def _scores(logits, here, METHOD: tl.constexpr, dtype: tl.constexpr):
    """Returns the scores that become weights, in the model's own roundings. A new method begins here."""
    if METHOD == "grouped_sigmoid":
        return _sigmoid(logits)
    if METHOD == "sqrt_softplus" or METHOD == "hash":
        soft = tl.where(logits > 20.0, logits, libdevice.log1p(libdevice.exp(tl.minimum(logits, 20.0))))
        return _rounded(tl.sqrt_rn(_rounded(soft, dtype)), dtype)
    if METHOD == "softmax_topk" or METHOD == "grouped_softmax":
        power = tl.where(here, libdevice.exp(logits - tl.max(tl.max(tl.where(here, logits, float("-inf")), 1), 0)), 0.0)
        return _divide(power, tl.sum(tl.sum(power, 1), 0))
    return logits


@triton.jit
def _weights(score, used, METHOD: tl.constexpr, RENORMALIZE: tl.constexpr, SCALING: tl.constexpr, dtype: tl.constexpr):
    """Returns the chosen experts' weights from their scores. A new method ends here."""
    if METHOD == "topk_softmax":
        power = tl.where(used, libdevice.exp(score - tl.max(tl.where(used, score, float("-inf")), 0)), 0.0)
        weight = _rounded(_divide(power, tl.sum(power, 0)), dtype)
    elif METHOD == "topk_sigmoid":
        weight = _rounded(_sigmoid(score), dtype)
    elif METHOD == "softmax_topk":
        total = tl.sum(tl.where(used, score, 0.0), 0)
        weight = _rounded(_divide(score, total) if RENORMALIZE else score, dtype)
    elif METHOD == "grouped_softmax" and RENORMALIZE:
        total = tl.sum(tl.where(used, score, 0.0), 0)
        weight = _divide(score, tl.where(total < _NORM_MIN, _NORM_MIN, total))
    elif RENORMALIZE:
        total = tl.zeros_like(score) + tl.sum(tl.where(used, score, 0.0), 0)
        weight = _rounded(_divide(score, _rounded(_rounded(total, dtype) + _EPSILON, dtype)), dtype)
    else:
        weight = score
    return weight if SCALING == 1.0 else _rounded(weight * SCALING, dtype)


@triton.jit
def _choose(key, position, k, END: tl.constexpr, K: tl.constexpr):
    """Returns [K_PAD] positions of the K largest keys, largest first."""
    chosen = tl.zeros_like(k)
    for rank in range(K):
        _, first = _first_of_best(key, position, END, 0)
        chosen = tl.where(k == rank, first, chosen)
        key = tl.where(position == first, _TAKEN, key)
    return chosen


_ANYWHERE = ["bias", "correction", "token_ids", "table", "padding"]


# The number of tokens changes from call to call: specialised, it would compile again after warm-up.
@triton.jit(do_not_specialize=["T", "V"], do_not_specialize_on_alignment=_ANYWHERE)
def choice_kernel(
    pieces, bias, correction, token_ids, table, padding, logits_out, ids, weights, T, V,
    METHOD: tl.constexpr, SPLITS: tl.constexpr,
    LOGITS_DTYPE: tl.constexpr, METHOD_DTYPE: tl.constexpr, CHOICE_DTYPE: tl.constexpr, WEIGHTS_DTYPE: tl.constexpr,
    E: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr, SIZE_PAD: tl.constexpr, TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    RENORMALIZE: tl.constexpr, SCALING: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Chooses token t's K experts in program t, or with METHOD "logits" writes its logits. The logits are the sum of
    `pieces` [SPLITS, T, E] and `bias`, rounded to LOGITS_DTYPE. GROUPS > 1: experts lie in rows of groups. Tokens that
    `padding` marks get E, which is no expert."""
    if PDL:
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    g, i = tl.arange(0, GROUPS_PAD)[:, None], tl.arange(0, SIZE_PAD)[None, :]
    expert = g * (E // GROUPS) + i
    here = (g < GROUPS) & (i < E // GROUPS)
    offset = tl.load(bias + expert, mask=here, other=0.0).to(tl.float32) if bias is not None else 0.0
    shift = tl.load(correction + expert, mask=here, other=0.0).to(tl.float32) if correction is not None else 0.0
    if PDL:
        gdc_wait()
    row, stride = pieces + t * E, T.to(tl.int64) * E
    logits = tl.zeros([GROUPS_PAD, SIZE_PAD], tl.float32)
    for split in tl.static_range(SPLITS):
        logits += tl.load(row + split * stride + expert, mask=here, other=0.0).to(tl.float32)
    logits = _rounded(logits + offset, LOGITS_DTYPE)
    if METHOD == "logits":
        tl.store(logits_out + t * E + expert, logits.to(METHOD_DTYPE), mask=here)
    else:
        k = tl.arange(0, K_PAD)
        used = k < K
        scores = _scores(logits, here, METHOD, METHOD_DTYPE)
        flat: tl.constexpr = GROUPS_PAD * SIZE_PAD
        if METHOD == "hash":
            token = tl.load(token_ids + t).to(tl.int64)
            known = (token >= 0) & (token < V)
            tl.device_assert(known, "a token id lies outside the table of hash routing")
            chosen = tl.load(table + token * K + k, mask=used & known, other=0).to(tl.int32)
            tl.device_assert((chosen >= 0) & (chosen < E), "the table of hash routing names an expert that isn't")
        else:
            # A softmax keeps the order of its logits, up to probabilities that round to the same number.
            for_choice = logits if METHOD == "softmax_topk" else _rounded(scores + shift, CHOICE_DTYPE)
            key = tl.where(here, _key(for_choice), _TAKEN)
            if GROUPS > 1:
                key = tl.where(_best_groups(key, g, i, TOP_GROUPS, GROUPS, GROUP_BEST), key, _TAKEN)
            chosen = _choose(tl.reshape(key, [flat]), tl.arange(0, flat), k, flat, K)
        score = tl.gather(tl.reshape(scores, [flat]), chosen, 0)
        weight = _rounded(_weights(score, used, METHOD, RENORMALIZE, SCALING, METHOD_DTYPE), WEIGHTS_DTYPE)
        found = (chosen // SIZE_PAD) * (E // GROUPS) + chosen % SIZE_PAD
        if padding is not None:
            found = tl.where(tl.load(padding + t) != 0, E, found)
        tl.store(ids + t * K + k, found, mask=used)
        tl.store(weights + t * K + k, weight, mask=used)


@triton.jit
def _rows(x, row, count, column, H: tl.constexpr, EVEN: tl.constexpr):
    """Loads [rows, columns] of x [count, H], zero outside."""
    mask = row[:, None] < count
    if not EVEN:
        mask = mask & (column[None, :] < H)
    return tl.load(x + row.to(tl.int64)[:, None] * H + column[None, :], mask=mask, other=0.0)


@triton.jit
def _product(x, w, BLOCK_H: tl.constexpr):
    """Multiplies bf16 x [rows, BLOCK_H] by the transpose of w, bf16 or float32; that is three bf16 numbers each, which
    hold its 24 bits (down to 2^-110, below which the last ones are lost), the smallest first."""
    some = tl.zeros([x.shape[0], w.shape[0]], tl.float32)
    # At most BLOCK_H products: or they would be added to the caller's sum inside.
    if w.dtype == tl.float32:
        high = w.to(tl.bfloat16)
        rest = w - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        some = tl.dot(x, low.T, some, max_num_imprecise_acc=BLOCK_H)
        some = tl.dot(x, middle.T, some, max_num_imprecise_acc=BLOCK_H)
        some = tl.dot(x, high.T, some, max_num_imprecise_acc=BLOCK_H)
    else:
        some = tl.dot(x, w.T, some, max_num_imprecise_acc=BLOCK_H)
    return some


@triton.jit(do_not_specialize=["T"])
def logits_kernel(
    hidden, weight, pieces, T,
    E: tl.constexpr, H: tl.constexpr, SPLITS: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes piece s of `pieces` [SPLITS, T, E]: hidden [T, H] @ weight [E, H].T over STEPS * BLOCK_H columns of H.
    Products of bf16 are exact in float32. Hopper's tensor cores cut off what a sum's last bit doesn't hold, always
    towards zero, so only BLOCK_H products are added there, their sums here."""
    if PDL:
        gdc_launch_dependents()
    tiles: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    even: tl.constexpr = H % (STEPS * BLOCK_H) == 0
    program = tl.program_id(0)
    t = program // (tiles * SPLITS) * BLOCK_T + tl.arange(0, BLOCK_T)
    split = program // tiles % SPLITS
    e = program % tiles * BLOCK_E + tl.arange(0, BLOCK_E)
    column = split * (STEPS * BLOCK_H) + tl.arange(0, BLOCK_H)
    if STEPS == 1:
        w = _rows(weight, e, E, column, H, even)  # constant, so it needn't wait for the kernel before
        if PDL:
            gdc_wait()
        total = _product(_rows(hidden, t, T, column, H, even), w, BLOCK_H)
    else:
        if PDL:
            gdc_wait()
        total = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
        for _ in range(STEPS):
            x = _rows(hidden, t, T, column, H, even)
            total += _product(x, _rows(weight, e, E, column, H, even), BLOCK_H)
            column += BLOCK_H
    target = pieces + (split * T.to(tl.int64) + t.to(tl.int64))[:, None] * E + e[None, :]
    tl.store(target, total, mask=(t < T)[:, None] & (e < E)[None, :])
