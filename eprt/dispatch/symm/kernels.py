"""Triton kernels of the symmetric-memory dispatcher: `dispatch_kernel` packs and pushes tokens, `combine_kernel` pulls
sums.

Addresses of peers come in two forms: `peers`, a tuple of W integers (each rank's buffer as mapped here), to which a
region's offset is added; and the *book*, int64 `[len(ENTRIES), MAX_RANKS]`, whose lines hold what one warp handles as
a vector. Peers talk through one 8-byte flag per (source, destination, phase): the source writes
`generation << R_BITS | R` with release semantics at system scope, the destination acquires it. The generation lives in
device memory and is advanced by the kernel itself, so a captured graph replays correctly.

Why a peer's memory is never overwritten while somebody needs it, without any barrier:

* A rank's dispatch g+1 writes into a peer's receive region only after its own combine g, on the same stream, has seen
  that peer's combine flag g, and the peer raises that flag after its executor has read the region.
* A rank's executor g+1 overwrites its output region only after its dispatch g+1 has seen every peer's dispatch flag
  g+1, and a peer raises that flag after its combine g has finished reading.
* A flag g+1 can't overwrite an unread flag g for the same reasons: each phase waits for all peers of the phase before.

Why nothing deadlocks, whatever the number of resident CTAs: in dispatch only the CTA that finishes last waits, when all
pushes of this rank are done; in combine CTA 0 raises this rank's flags before any CTA waits, and the hardware starts
CTAs in index order.
"""
# Triton's language isn't typed: its values are tensors of the kernel, whatever a checker makes of them.
# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from eprt.dispatch.symm.memory import ENTRIES, MAX_RANKS, R_BITS
from eprt.quant.payload_kernels import fp8_groups, nvfp4_groups
from eprt.weights import FP8_BLOCK, NVFP4_BLOCK

# Lines of the address book: the flags that this rank raises at peer p, the flags that peer p raises here, ...
RAISE_DISPATCH = tl.constexpr(ENTRIES.index("raise_dispatch"))
RAISE_COMBINE = tl.constexpr(ENTRIES.index("raise_combine"))
SEE_DISPATCH = tl.constexpr(ENTRIES.index("see_dispatch"))
SEE_COMBINE = tl.constexpr(ENTRIES.index("see_combine"))
# ... and the words that say what is wrong with peer p, in device memory and in pinned host memory: 0 nothing, -1 no
# flag within the limit, positive the peer's R, which isn't ours.
FAULT = tl.constexpr(ENTRIES.index("fault"))
HOST_FAULT = tl.constexpr(ENTRIES.index("host_fault"))

ROUTING_BLOCK = 1024  # ids and weights that one CTA forwards

_RANKS = tl.constexpr(MAX_RANKS)
_R_BITS = tl.constexpr(R_BITS)
_R_MASK = tl.constexpr((1 << R_BITS) - 1)
_ROUTING_BLOCK = tl.constexpr(ROUTING_BLOCK)
_FP8_BLOCK = tl.constexpr(FP8_BLOCK)
_NVFP4_BLOCK = tl.constexpr(NVFP4_BLOCK)


# One warp polls: a whole CTA, times all CTAs of combine, would queue thousands of reads in front of the flag's write.
_WAIT = tl.constexpr("""
{
    .reg .pred skip, seen, early;
    .reg .u32 thread;
    .reg .u64 start, now;
    mov.u64 $0, $2;
    mov.u32 thread, %tid.x;
    setp.ge.u32 skip, thread, 32;
    @skip bra finished;
    mov.u64 start, %globaltimer;
poll:
    ld.acquire.sys.global.u64 $0, [$1];
    setp.ge.u64 seen, $0, $2;
    @seen bra finished;
    mov.u64 now, %globaltimer;
    sub.u64 now, now, start;
    setp.lt.u64 early, now, $3;
    @early bra poll;
    st.relaxed.sys.global.s32 [$4], -1;
    st.relaxed.sys.global.s32 [$5], -1;
finished:
}
""")

_RAISE = tl.constexpr("""
{
    .reg .pred skip;
    .reg .u32 thread;
    mov.u32 $0, 0;
    mov.u32 thread, %tid.x;
    setp.ge.u32 skip, thread, 32;
    @skip bra finished;
    st.release.sys.global.u64 [$1], $2;
finished:
}
""")


@triton.jit
def _region(base, at, dtype: tl.constexpr):
    """Returns a peer's region. Regions start at multiples of 256 bytes, which lets accesses be 16 bytes wide."""
    place = base.to(tl.int64) + at  # the interpreter takes a low address for 32 bits
    return tl.multiple_of(place.to(tl.pointer_type(dtype)), 16)


@triton.jit
def _raise_flags(book, entry: tl.constexpr, lane, flag):
    """Raises flags with release semantics: whatever happened before is visible to a peer that acquires its flag."""
    tl.inline_asm_elementwise(
        _RAISE, "=&r,l,l", [tl.load(book + entry * _RANKS + lane), flag], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _wait_flags(book, entry: tl.constexpr, lane, generation, R, limit_ns):
    """Acquires the flags of all peers, or records which of them did not come, and goes on: the host raises.

    A peer that was missing once is not waited for again, so a graph of many layers ends after one limit.
    """
    fault = tl.load(book + FAULT * _RANKS + lane)
    host_fault = tl.load(book + HOST_FAULT * _RANKS + lane)
    known = tl.load(fault.to(tl.pointer_type(tl.int32)))
    limit = tl.where(known == 0, limit_ns.to(tl.int64), 0)
    wanted = generation << _R_BITS
    flag = tl.inline_asm_elementwise(
        _WAIT,
        "=&l,l,l,l,l,l",
        [tl.load(book + entry * _RANKS + lane), wanted + lane * 0, limit, fault, host_fault],
        tl.int64,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()
    # Warps that did not poll hold `wanted` itself, whose R is 0.
    theirs = (flag & _R_MASK).to(tl.int32)
    differs = (flag >= wanted) & (theirs != 0) & (theirs != R)
    tl.store(fault.to(tl.pointer_type(tl.int32)), theirs, mask=differs)
    tl.store(host_fault.to(tl.pointer_type(tl.int32)), theirs, mask=differs)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _destinations(ids, E: tl.constexpr, L: tl.constexpr, MOE_TP: tl.constexpr):
    """Returns bits; bit p: rank p holds (a slice of) one of these experts."""
    group: tl.constexpr = (1 << MOE_TP) - 1
    valid = (ids >= 0) & (ids < E)
    bits = tl.where(valid, group << (tl.where(valid, ids, 0) // L * MOE_TP), 0)
    return tl.reduce(bits, 0, _either)


@triton.jit
def _forward_routing(
    block, ids, weights, peers, ids_at, weights_at, T, R, rank,
    E: tl.constexpr, L: tl.constexpr, MOE_TP: tl.constexpr, W: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Sends one block of R * K top-k entries to every rank; ids that aren't for it, and of rows past T, become E."""
    entry = block * _ROUTING_BLOCK + tl.arange(0, _ROUTING_BLOCK)
    inside = entry < R * K
    e = tl.load(ids + entry, mask=entry < T * K, other=E)
    weight = tl.load(weights + entry, mask=entry < T * K, other=0.0)
    holder = tl.where((e >= 0) & (e < E), e // L, -1)
    for i in tl.static_range(W):
        peer = (rank + i) % W
        at = rank * R * K + entry
        to_ids = _region(peers[i], ids_at, tl.int32)
        to_weights = _region(peers[i], weights_at, tl.float32)
        tl.store(to_ids + at, tl.where(holder == peer // MOE_TP, e, E), mask=inside)
        tl.store(to_weights + at, weight, mask=inside)


@triton.jit
def _push_row(rows, t, chunk, wanted, peers, at, R, rank, W: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Pushes words [chunk * BLOCK, ...) of row t to every rank whose bit is set in `wanted`."""
    word = chunk * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(rows + t.to(tl.int64) * WORDS + word, mask=word < WORDS)
    for i in tl.static_range(W):
        peer = (rank + i) % W  # every rank starts with itself, so that no rank is everybody's first target
        if (wanted >> peer) & 1:
            to = _region(peers[i], at, rows.dtype.element_ty)
            tl.store(to + (rank * R + t).to(tl.int64) * WORDS + word, value, mask=word < WORDS)


@triton.jit
def _push_packed(
    rows, global_scale, t, chunk, wanted, peers, data_at, scale_at, R, rank,
    W: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, PAYLOAD: tl.constexpr,
):  # fmt: skip
    """Pushes columns [chunk * BLOCK, ...) of row t, packed, and their scales, to every rank whose bit is set."""
    size: tl.constexpr = _FP8_BLOCK if PAYLOAD == "fp8_block" else _NVFP4_BLOCK
    groups: tl.constexpr = (H + size - 1) // size
    group = chunk * (BLOCK // size) + tl.arange(0, BLOCK // size)
    column = group[:, None] * size + tl.arange(0, size)[None, :]
    value = tl.load(rows + t.to(tl.int64) * H + column, mask=column < H, other=0.0).to(tl.float32)
    if PAYLOAD == "fp8_block":
        width: tl.constexpr = H
        at = column
        code, factor = fp8_groups(value)
    else:
        width: tl.constexpr = H // 2
        at = group[:, None] * 8 + tl.arange(0, 8)[None, :]
        code, factor = nvfp4_groups(value, tl.load(global_scale))
    for i in tl.static_range(W):
        peer = (rank + i) % W
        if (wanted >> peer) & 1:
            row = (rank * R + t).to(tl.int64)
            tl.store(_region(peers[i], data_at, code.dtype) + row * width + at, code, mask=at < width)
            tl.store(_region(peers[i], scale_at, factor.dtype) + row * groups + group, factor, mask=group < groups)


@triton.jit(do_not_specialize=["T", "R", "rank", "limit_ns"], do_not_specialize_on_alignment=["ids", "weights"])
def dispatch_kernel(
    rows, global_scale, ids, weights, peers, data_at, scale_at, ids_at, weights_at, book, state, T, R, rank, limit_ns,
    E: tl.constexpr, L: tl.constexpr, MOE_TP: tl.constexpr, W: tl.constexpr, K: tl.constexpr, K_POW2: tl.constexpr,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, PAYLOAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Pushes T tokens and their routing, then waits until every peer's have arrived.

    rows [T, WORDS], 16-byte aligned: bf16 numbers for a packed PAYLOAD, else words of any width that travel as they
    are. global_scale: float32 [1] for `nvfp4`, else any pointer. ids, weights [T, K]. peers: every rank's buffer, this
    rank's first, then in rank order, round.
    state int64 [2]: this buffer's generation, and how many CTAs have finished.
    PDL: launched while the kernel before still ends, whose results must not be touched before `gdc_wait`.
    Grid: ceil(R * K / ROUTING_BLOCK) CTAs for routing, then any number of CTAs that share the rows.
    """
    if PDL:
        gdc_wait()
    pid = tl.program_id(0)
    lane = tl.arange(0, _RANKS) % W
    generation = tl.load(state) + 1
    routing_blocks = tl.cdiv(R * K, _ROUTING_BLOCK)
    if pid < routing_blocks:
        _forward_routing(pid, ids, weights, peers, ids_at, weights_at, T, R, rank, E, L, MOE_TP, W, K)
    else:
        chunks: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
        k = tl.arange(0, K_POW2)
        step = tl.num_programs(0) - routing_blocks
        for item in range(pid - routing_blocks, T * chunks, step):
            t = item // chunks
            chunk = item % chunks
            wanted = _destinations(tl.load(ids + t * K + k, mask=k < K, other=E), E, L, MOE_TP)
            if PAYLOAD == "bf16":
                _push_row(rows, t, chunk, wanted, peers, data_at, R, rank, W, WORDS, BLOCK)
            else:
                _push_packed(
                    rows, global_scale, t, chunk, wanted, peers, data_at, scale_at, R, rank, W, WORDS, BLOCK, PAYLOAD
                )
    tl.debug_barrier()  # all warps' stores come before the count that one thread adds
    # Release and acquire are cumulative: what is ordered before the last CTA in this GPU's scope, its flag, which is
    # raised in the system's, orders before the peers.
    finished = tl.atomic_add(state + 1, 1, sem="acq_rel", scope="gpu")
    if finished == tl.num_programs(0) - 1:
        tl.store(state + 1, 0)
        tl.store(state, generation)
        _raise_flags(book, RAISE_DISPATCH, lane, (generation << _R_BITS) + R + lane * 0)
        _wait_flags(book, SEE_DISPATCH, lane, generation, R, limit_ns)


@triton.jit
def _bf16_bits(x):
    """Returns the nearest bf16, in the low half of an int32."""
    return x.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)


@triton.jit(do_not_specialize=["T", "R", "rank", "limit_ns"], do_not_specialize_on_alignment=["ids"])
def combine_kernel(
    out, ids, peers, output_at, book, state, T, R, rank, limit_ns,
    E: tl.constexpr, L: tl.constexpr, MOE_TP: tl.constexpr, W: tl.constexpr, K: tl.constexpr, K_POW2: tl.constexpr,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sums each token's rows over the ranks it went to, in float32 and in rank order.

    out [T, WORDS]: bf16 rows as words, pairs of numbers in int32 or single ones in int16; so are the rows that are
    pulled. PDL: as in dispatch. Grid: any number of CTAs, at least one. T = 0 is the handshake alone.
    """
    if PDL:
        gdc_wait()
    pid = tl.program_id(0)
    lane = tl.arange(0, _RANKS) % W
    generation = tl.load(state)
    chunks: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    k = tl.arange(0, K_POW2)
    column = tl.arange(0, BLOCK)
    if pid == 0:
        _raise_flags(book, RAISE_COMBINE, lane, (generation << _R_BITS) + R + lane * 0)
    # The next row's ids are read ahead: behind the wait first, then behind the row before.
    e = tl.load(ids + pid // chunks * K + k, mask=(k < K) & (pid < T * chunks), other=E)
    _wait_flags(book, SEE_COMBINE, lane, generation, R, limit_ns)
    for item in range(pid, T * chunks, tl.num_programs(0)):
        t = item // chunks
        word = item % chunks * BLOCK + column
        wanted = _destinations(e, E, L, MOE_TP)
        ahead = item + tl.num_programs(0)
        e = tl.load(ids + ahead // chunks * K + k, mask=(k < K) & (ahead < T * chunks), other=E)
        pulled = ()
        for peer in tl.static_range(W):
            rows = _region(peers[peer], output_at, out.dtype.element_ty)
            here = (word < WORDS) & (((wanted >> peer) & 1) != 0)
            row = tl.load(rows + (rank * R + t).to(tl.int64) * WORDS + word, mask=here, other=0)
            pulled = pulled + (row,)  # noqa: RUF005 - Triton knows no unpacking
        # Keeps all ranks' loads in flight together: to save registers, ptxas would make several round trips of them.
        tl.debug_barrier()
        low = tl.zeros((BLOCK,), tl.float32)
        high = tl.zeros((BLOCK,), tl.float32)
        for peer in tl.static_range(W):
            bits = pulled[peer].to(tl.int32)
            low += (bits << 16).to(tl.float32, bitcast=True)
            high += (bits & -65536).to(tl.float32, bitcast=True)
        bits = _bf16_bits(low) | (_bf16_bits(high) << 16)
        tl.store(out + t.to(tl.int64) * WORDS + word, bits.to(out.dtype.element_ty), mask=word < WORDS)
