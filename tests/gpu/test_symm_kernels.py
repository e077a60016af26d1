"""The symm kernels on one GPU: every rank is a stream, every rank's memory an ordinary allocation.

NVLink is not involved, so this proves indexing, the flags' protocol and the bounded wait; `test_dispatchers.py` proves
the transport. The witness is torch indexing, written without the kernels; sums in rank order make the result exact.

Interpreted on the CPU the ranks run one after another (`support/stand_ins/symm_kernels_on_cpu.py`), which proves
indexing, generations, buffers and how a wait's outcome is reported, but nothing of memory order, of ranks that run at
once, or of time.
"""

from __future__ import annotations

import itertools
import mmap
import platform
import time
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from support.stand_ins.kernel_device import DEVICE, INTERPRETED, cuda_only, runs_kernels, sized

from eprt.config import ParallelConfig
from eprt.dispatch.call import LostExperts
from eprt.dispatch.symm.launch import TUNING, Launcher
from eprt.dispatch.symm.memory import SymmetricMemory, SymmGeometry
from eprt.errors import RankLost, UsageError, WorldMismatch
from eprt.quant import encode_payload
from eprt.tokens import Payload, TopK

pytestmark = [pytest.mark.gpu, runs_kernels]

PAYLOADS = ("bf16", "fp8_block", "nvfp4")
GLOBAL_SCALE = 1 / 64
MAP_32BIT = 0x40  # of Linux on x86: in the lowest 2 GiB; Python 3.13 has it in mmap


@dataclass
class Batch:
    """`sent`: what must arrive, packed by plain torch on the CPU."""

    hidden: torch.Tensor
    sent: Payload
    topk: TopK


def memory_of(size: int, *, low: bool) -> torch.Tensor:
    """u8 [size], 255 everywhere. `low`, where it is the CPU's: at an address of 31 bits, as in a Python that isn't
    position-independent (Debian's), which the interpreter takes for a number of 32."""
    if low and INTERPRETED and platform.machine() == "x86_64":
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_32BIT)
        memory = torch.frombuffer(pages, dtype=torch.uint8).fill_(255)
        assert memory.data_ptr() < 1 << 31
        return memory
    return torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)


class Ranks:
    """W ranks of one process. `expert_output[p]` plays the executors: random numbers, NaN where none may be read."""

    def __init__(self, W, E, K, H, capacity, payload="bf16", moe_tp=1, timeout_s=20.0):
        self.W, self.E, self.K, self.H, self.moe_tp = W, E, K, H, moe_tp
        self.L = E // (W // moe_tp)
        self.left = list(range(W))  # ranks that make calls
        self.global_scale = torch.tensor([GLOBAL_SCALE], device=DEVICE)
        self.geometry = SymmGeometry(W, capacity, H, K, payload)
        self.raw = raw = [memory_of(self.geometry.num_bytes, low=rank % 2 == 0) for rank in range(W)]
        for memory in raw:
            memory[: 2 * 256].zero_()
        # [index, phase, source] of each rank: 256 bytes per buffer, two lines of 8 flags of 8 bytes
        self.flags = [memory[: 2 * 256].view(torch.int64).view(2, 4, 8)[:, :2, :W] for memory in raw]
        bases = [memory.data_ptr() for memory in raw]
        self.memories = [SymmetricMemory(self.geometry, r, raw[r], bases) for r in range(W)]
        # All ranks' waiting CTAs share one GPU here, so they must fit it together. Interpreted, a few share all rows.
        most = sized({"combine_ctas": 264 // W}, {"combine_ctas": 7, "dispatch_ctas": 9})
        tuning = [row._replace(**{name: min(getattr(row, name), n) for name, n in most.items()}) for row in TUNING]
        self.launchers = [Launcher(memory, E, self.L, moe_tp, timeout_s, tuple(tuning)) for memory in self.memories]
        self.streams = [] if INTERPRETED else [torch.cuda.Stream() for _ in range(W)]
        self.synchronize()

    def order(self, index):
        """Interpreted, a rank overwrites what those before it wrote past their rows."""
        return self.left if index else self.left[::-1]

    def stream(self, r):
        return nullcontext() if INTERPRETED else torch.cuda.stream(self.streams[r])

    def synchronize(self, least_waits=0):
        """Every rank that will arrive has: its kernels, waits included, have run."""
        if INTERPRETED:
            from support.stand_ins.symm_kernels_on_cpu import examine_waits

            assert examine_waits() >= least_waits
        else:
            torch.cuda.synchronize()

    def batch(self, T, hot=False):
        size = torch.randint(-8, 6, (T, 1)).exp2()
        hidden = (torch.randn(T, self.H) * size).bfloat16()
        scale = torch.tensor([GLOBAL_SCALE]) if self.geometry.payload == "nvfp4" else None
        sent = encode_payload(hidden, self.geometry.payload, scale)
        hidden = hidden.to(DEVICE)
        if hot:
            ids = torch.arange(self.K, device=DEVICE).expand(T, -1)
        else:
            ids = torch.rand(T, self.E, device=DEVICE).topk(self.K, dim=1).indices
        ids = torch.where(torch.rand(T, self.K, device=DEVICE) < 0.1, self.E, ids).int().contiguous()
        return Batch(hidden, sent, TopK(ids, torch.rand(T, self.K, device=DEVICE)))

    def dispatch(self, index, batches, R, ranks=None):
        for r in ranks or self.order(index):
            with self.stream(r):
                self.launchers[r].dispatch(index, batches[r].hidden, batches[r].topk, R, self.global_scale)
        if INTERPRETED and ranks is None:
            self.synchronize(least_waits=len(self.left))

    def combine(self, index, batches, R, ranks=None):
        outs = {}
        for r in ranks or self.order(index):
            with self.stream(r):
                T = batches[r].topk.ids.shape[0]
                outs[r] = torch.full((T, self.H), float("nan"), dtype=torch.bfloat16, device=DEVICE)
                self.launchers[r].combine(index, outs[r], batches[r].topk.ids, R)
        if INTERPRETED and ranks is None:
            self.synchronize(least_waits=len(self.left))
        return outs

    def wanted_ids(self, ids, p):
        """What rank p must see of ids [T, K]."""
        mine = (ids < self.E) & (ids // self.L == p // self.moe_tp)
        return torch.where(mine, ids, self.E)

    def check_received(self, index, batches, R):
        for p in self.left:
            memory = self.memories[p]
            ids, weights = (x.view(self.W, R, self.K) for x in memory.routing(index, R))
            hidden = memory.payload(index, R, None)
            for s in self.left:
                batch = batches[s]
                T = batch.topk.ids.shape[0]
                wanted = self.wanted_ids(batch.topk.ids, p)
                assert torch.equal(ids[s, :T], wanted)
                assert (ids[s, T:] == self.E).all()
                assert torch.equal(weights[s, :T][wanted < self.E], batch.topk.weights[wanted < self.E])
                rows = (wanted < self.E).any(1)
                for got, sent in ((hidden.data, batch.sent.data), (hidden.scale, batch.sent.scale)):
                    if sent is not None:
                        got_rows = got.view(torch.uint8).view(self.W, R, -1)[s, :T][rows]
                        assert torch.equal(got_rows, sent.view(torch.uint8).to(DEVICE)[rows])

    def write_outputs(self, index, batches, R):
        """Half of the numbers are -2**26, 0 or 2**26, which cancel: another order than the ranks' has another sum."""
        for p in self.left:
            out = self.memories[p].output(index, R).view(self.W, R, self.H)
            out.fill_(float("nan"))
            for s, batch in enumerate(batches):
                T = batch.topk.ids.shape[0]
                rows = (self.wanted_ids(batch.topk.ids, p) < self.E).any(1)
                value, large = torch.randn_like(out[s, :T]), torch.randint_like(out[s, :T], -1, 2) * 2.0**26
                value = torch.where(torch.rand_like(value) < 0.5, large, value)
                out[s, :T] = torch.where(rows[:, None], value, float("nan"))

    def check_combined(self, index, batches, outs, R):
        for s in self.left:
            batch = batches[s]
            T = batch.topk.ids.shape[0]
            total = torch.zeros(T, self.H, device=DEVICE)
            for p in self.left:
                rows = (self.wanted_ids(batch.topk.ids, p) < self.E).any(1)
                row = self.memories[p].output(index, R).view(self.W, R, self.H)[s, :T]
                total += torch.where(rows[:, None], row.float(), 0.0)
            assert torch.equal(outs[s], total.bfloat16())

    def check_flags(self, index, generation, phases, R):
        """Every rank has every other's flag of these phases, and has counted this generation."""
        for flags, memory in ((self.flags[p], self.memories[p]) for p in self.left):
            assert (flags[index, :phases, self.left] == generation * 2**20 + R).all()
            assert memory.states[index, :2].tolist() == [generation, 0]

    def step(self, index, batches, R):
        self.synchronize()  # the batches were made on another stream
        generation = int(self.memories[self.left[0]].states[index, 0]) + 1
        self.dispatch(index, batches, R)
        self.synchronize()
        self.check_flags(index, generation, 1, R)
        self.check_received(index, batches, R)
        self.write_outputs(index, batches, R)
        self.synchronize()
        outs = self.combine(index, batches, R)
        self.synchronize()
        self.check_flags(index, generation, 2, R)
        self.check_combined(index, batches, outs, R)
        assert not any(any(self.memories[p]._seen_fault) for p in self.left)


# H, K
SIZES = [(128, 1), (2880, 4), (4096, 3), (7168, 8), (7168, 6), (144, 4)]
# Tokens of each rank, and R: up to 64 and above differ in block sizes; 130 * K 8 is more than one block of routing.
COUNTS = [
    (sized([5, 3, 7, 1], [2, 0, 4, 1]), sized(7, 4)),
    ([0, 0, 1, 0], 1),
    ([0, 0, 0, 0], 1),
    (sized([130, 0, 33, 100], [3, 0, 4, 0]), 130),
    ([1, 1, 1, 1], 1),
]


@pytest.mark.parametrize(
    ("size", "payload"), sized([*itertools.product(SIZES, PAYLOADS)], [*zip(SIZES, PAYLOADS * 2, strict=True)]), ids=str
)
def test_every_row_arrives_and_returns(size, payload):
    torch.manual_seed(0)
    H, K = size
    ranks = Ranks(W=4, E=32, K=K, H=H, capacity=130, payload=payload)
    for i, (counts, R) in enumerate(COUNTS):
        ranks.step(i % 2, [ranks.batch(T, hot=i == 3) for T in counts], R)


@pytest.mark.parametrize(("W", "moe_tp"), [(1, 1), (2, 1), (2, 2), (4, 2), (3, 1), (8, 2), (8, 1)])
def test_world_sizes_and_moe_tp(W, moe_tp):
    torch.manual_seed(1)
    ranks = Ranks(W=W, E=24, K=4, H=512, capacity=80, moe_tp=moe_tp, payload=PAYLOADS[(W + moe_tp) % 3])
    for counts, R in (([sized(3, 2)] * W, 3), ([0] * (W - 1) + [sized(80, 4)], 80)):
        ranks.step(0, [ranks.batch(T) for T in counts], R)


@pytest.mark.parametrize(("H", "payload"), [(77, "bf16"), (77, "fp8_block"), (1040, "nvfp4")])
def test_rows_that_end_within_a_block(H, payload):
    ranks = Ranks(W=2, E=8, K=2, H=H, capacity=9, payload=payload)
    ranks.step(1, [ranks.batch(9), ranks.batch(2)], R=9)


def test_many_steps_without_host_synchronisation():
    """Slots alternate and repeat, counts change, nothing but the kernels orders the ranks."""
    torch.manual_seed(2)
    ranks = Ranks(W=4, E=32, K=4, H=256, capacity=70)
    schedule = [[int(c) for c in torch.randint(0, sized(71, 5), (4,))] for _ in range(sized(150, 5))]
    batches = [[ranks.batch(T) for T in counts] for counts in schedule]
    checks = []
    ranks.step(0, batches[0], R=70)  # compiles, and loads torch's kernels: that may wait for a busy device
    _ = (torch.ones(2, device=DEVICE).nan_to_num(0, 1, -1).clamp(-9, 9) * 2).bfloat16()
    ranks.synchronize()
    for i, step in enumerate(batches):
        index, R = i * 7 % 3 % 2, max(*schedule[i], sized(1, 1 + i % 3 * 33))
        ranks.dispatch(index, step, R)
        for r, memory in enumerate(ranks.memories):
            with ranks.stream(r):  # every expert of rank p multiplies by p + 1
                hidden = memory.payload(index, R, None).data
                memory.output(index, R).copy_((hidden.float().nan_to_num(0, 1, -1).clamp(-9, 9)) * (r + 1))
        checks.append((step, ranks.combine(index, step, R)))
    ranks.synchronize()
    for step, outs in checks:
        for s, batch in enumerate(step):
            x = batch.hidden.float().nan_to_num(0, 1, -1).clamp(-9, 9)
            total = torch.zeros_like(x)
            for p in range(4):
                rows = (ranks.wanted_ids(batch.topk.ids, p) < ranks.E).any(1)
                total += torch.where(rows[:, None], (x * (p + 1)).bfloat16().float(), 0.0)
            assert torch.equal(outs[s], total.bfloat16())


@cuda_only
def test_graph_replays_with_new_data():
    torch.manual_seed(3)
    R = 70
    ranks = Ranks(W=2, E=16, K=4, H=512, capacity=R)
    static = [ranks.batch(R) for _ in range(2)]
    ranks.step(0, static, R)  # compiles
    graphs, outs = [], {}
    for r in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=ranks.streams[r]):
            ranks.dispatch(0, static, R, ranks=[r])
            ranks.memories[r].output(0, R).copy_(ranks.memories[r].payload(0, R, None).data)
            outs.update(ranks.combine(0, static, R, ranks=[r]))
        graphs.append(graph)
    for counts in ([70, 70], [3, 0], [0, 0], [0, 70]):
        for batch, T in zip(static, counts, strict=True):
            batch.hidden.copy_(torch.randn(R, 512, device=DEVICE))
            batch.sent.data.copy_(batch.hidden)
            fresh = torch.rand(R, 16, device=DEVICE).topk(4, dim=1).indices.int()
            fresh[T:] = 16
            batch.topk.ids.copy_(fresh)
        torch.cuda.synchronize()
        for r, graph in enumerate(graphs):
            with torch.cuda.stream(ranks.streams[r]):
                graph.replay()
        torch.cuda.synchronize()
        ranks.check_received(0, static, R)
        ranks.check_combined(0, static, outs, R)


LIMIT_S = 2.0  # of a wait; other tests may share the GPU


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_a_missing_rank_is_named_in_bounded_time(phase):
    ranks = Ranks(W=3, E=6, K=2, H=128, capacity=4, timeout_s=LIMIT_S)
    batches = [ranks.batch(4) for _ in range(3)]
    ranks.step(0, batches, R=4)
    present = [0, 2]
    started = time.monotonic()
    ranks.dispatch(0, batches, 4, ranks=present if phase == "dispatch" else None)
    ranks.combine(0, batches, 4, ranks=present)
    ranks.synchronize()
    assert all(any(ranks.memories[r]._seen_fault) for r in present)
    ranks.dispatch(1, batches, 4, ranks=present)  # not waited for again
    ranks.synchronize()
    assert INTERPRETED or 0.9 * LIMIT_S < time.monotonic() - started < 1.9 * LIMIT_S
    for r in present:
        with pytest.raises(RankLost, match="rank 1 silent") as caught:
            ranks.memories[r].raise_faults(LIMIT_S)
        assert caught.value.rank == 1
    assert not any(ranks.memories[1]._seen_fault)


@pytest.mark.parametrize(
    ("lost", "payload", "moe_tp"), [([2], "bf16", 1), ([0, 3], "fp8_block", 1), ([2, 3], "nvfp4", 2)]
)
def test_the_others_go_on_without_lost_ranks(lost, payload, moe_tp):
    """The lost were in the middle of a call, and so were some of the others. What was theirs is never touched again."""
    torch.manual_seed(4)
    ranks = Ranks(W=4, E=16, K=4, H=256, capacity=130, payload=payload, moe_tp=moe_tp, timeout_s=LIMIT_S)
    for index in (0, 1, 0):
        ranks.step(index, [ranks.batch(3) for _ in range(4)], R=4)
    unfinished = [ranks.batch(3) for _ in range(4)]
    ranks.synchronize()
    ranks.dispatch(1, unfinished, 5, ranks=[1])
    ranks.synchronize()
    assert any(ranks.memories[1]._seen_fault)
    ranks.memories[1].in_flight.acquire()
    alive = tuple(rank not in lost for rank in range(4))
    for rank in lost:
        ranks.raw[rank].fill_(99)
    ranks.left = [rank for rank in range(4) if alive[rank]]
    for rank in ranks.left:
        ranks.memories[rank].resume(alive)
    assert ranks.memories[1].in_flight.acquire() == 0
    without = LostExperts(alive, ParallelConfig(4, moe_tp_size=moe_tp), ranks.E, torch.device(DEVICE), renormalize=True)
    for i, (counts, R) in enumerate(COUNTS):
        batches = [ranks.batch(T) for T in counts]
        for batch in batches:
            batch.topk = without.left_out(batch.topk)
        ranks.step(i % 2, batches, R)
    assert all((ranks.raw[rank] == 99).all() for rank in lost)


@cuda_only
def test_a_kernel_that_waits_for_a_lost_rank_is_freed_by_its_host():
    ranks = Ranks(W=2, E=4, K=2, H=128, capacity=4, timeout_s=60.0)
    batches = [ranks.batch(4) for _ in range(2)]
    ranks.step(0, batches, R=4)
    started = time.monotonic()
    ranks.dispatch(0, batches, 4, ranks=[0])
    ranks.combine(0, batches, 4, ranks=[0])
    done = torch.cuda.Event()
    done.record(ranks.streams[0])
    while not done.query() and time.monotonic() - started < 30.0:
        ranks.memories[0].release()
    assert done.query()
    ranks.memories[0].resume((True, False))
    assert not any(ranks.memories[0]._seen_fault)


def test_unequal_tokens_per_rank_is_noticed():
    ranks = Ranks(W=2, E=4, K=2, H=128, capacity=8)
    batches = [ranks.batch(4) for _ in range(2)]
    ranks.synchronize()
    ranks.dispatch(0, batches, 4, ranks=[0])
    ranks.dispatch(0, batches, 8, ranks=[1])
    ranks.synchronize()
    with pytest.raises(WorldMismatch, match=r"\{1: 8\}"):
        ranks.memories[0].raise_faults(1.0)
    with pytest.raises(WorldMismatch, match=r"\{0: 4\}"):
        ranks.memories[1].raise_faults(1.0)


@cuda_only
def test_buffers_run_out_with_a_remedy():
    memory = Ranks(W=1, E=4, K=2, H=128, capacity=8).memories[0]
    assert [memory.in_flight.acquire(), memory.in_flight.acquire()] == [0, 1]
    with pytest.raises(UsageError, match="combine or close"):
        memory.in_flight.acquire()
    memory.in_flight.release(0)
    assert memory.in_flight.acquire() == 0
