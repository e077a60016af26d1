"""The layer with the Blackwell executors behind the dispatchers that need libraries: a thread a rank, stand-ins for the
libraries and for the kernels. For test_sm100_pairs.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import torch

from eprt.config import MoEConfig, PayloadFormat, RuntimeConfig
from eprt.conformance.cases import CASES, Batch, make_batch
from eprt.conformance.checks import NanOutput
from eprt.conformance.oracle import expected_outputs, full_weights, layer_of, relative_error
from eprt.dispatch import DISPATCHERS
from eprt.experts.reference import decode_hidden
from eprt.plan import Candidate
from eprt.quant import encode_payload
from eprt.weights import ExpertWeights, Nvfp4
from support.jobs.sm100_jobs import executors_on_cpu
from support.stand_ins import deepep as deepep_stand_in
from support.stand_ins import flashinfer as flashinfer_stand_in
from support.stand_ins import symm as symm_stand_in
from support.stand_ins.flashinfer import FakeWorld, run_ranks

SIZE = 4
CAPACITY = 32
_LARGEST = 15 / (6 * 448)  # second-level scale for the conformance tokens: whole numbers up to 15

INSTALL: dict[str, Callable] = {
    "symm": lambda monkeypatch: symm_stand_in.install(monkeypatch, SIZE),
    "flashinfer": lambda monkeypatch: flashinfer_stand_in.install(monkeypatch, SIZE),
    "deepep": deepep_stand_in.install,
}


def install(monkeypatch, dispatcher: str) -> None:
    """`dispatcher` on a stand-in, where a layer on CPU ranks can ask for it, for the rest of a test."""
    INSTALL[dispatcher](monkeypatch)
    on_cpu = replace(DISPATCHERS[dispatcher], devices=("cpu",), requirement=None)
    monkeypatch.setitem(DISPATCHERS, dispatcher, on_cpu)


@contextmanager
def _one_thread_a_rank() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def weights_of(config: MoEConfig) -> ExpertWeights:
    """All experts. NVFP4: calibrated differently, so that ranks must agree on the scale of packed tokens; what the
    executors quantise by themselves has another one (`sm100_jobs`)."""
    full = full_weights(config)
    if not isinstance(full.gate_up, Nvfp4):
        return full
    scale = torch.linspace(0.5, 1.0, config.num_experts)[:, None] * _LARGEST
    scale = scale.expand(-1, config.activation.parts).contiguous()
    return replace(full, gate_up=replace(full.gate_up, input_scale=scale))


@cache
def expected(config: MoEConfig, payload: PayloadFormat | None) -> dict[tuple[str, int, int], torch.Tensor]:
    """By case, call and rank: the oracle's output for tokens as they travel."""

    def travelled(batch: Batch) -> Batch:
        if payload is None:
            return batch
        return replace(batch, hidden=decode_hidden(encode_payload(batch.hidden, payload, torch.tensor([_LARGEST]))))

    batches = {
        (case.name, call, rank): travelled(make_batch(case, call, rank, SIZE, config, torch.bfloat16))
        for case in CASES
        for call in range(case.num_calls)
        for rank in range(SIZE)
    }
    outputs = expected_outputs(config, weights_of(config), list(batches.values()))
    return dict(zip(batches, outputs, strict=True))


def wrong_cases(pair: Candidate, config: MoEConfig, payload: PayloadFormat | None, bound: float) -> list[str]:
    """Every case through one layer, warmed up: what is off by more than `bound`, or breaks a kernel's contract."""
    fabric = deepep_stand_in.Fabric(SIZE)

    def job(world: FakeWorld) -> list[str]:
        world.group = deepep_stand_in.Group(fabric, world.rank) if pair.dispatcher == "deepep" else None
        world.timeout_s = symm_stand_in.TIMEOUT_S
        try:
            return _wrong(world, pair, config, payload, wanted, bound)
        except (AssertionError, threading.BrokenBarrierError) as broken:
            return [f"{type(broken).__name__}: {broken}"]

    with executors_on_cpu(), _one_thread_a_rank():
        wanted = expected(config, payload)
        found = run_ranks(job, SIZE)
    return [f"{pair.executor}: rank {rank}: {text}" for rank, texts in enumerate(found) for text in texts]


def _wrong(
    world: FakeWorld,
    pair: Candidate,
    config: MoEConfig,
    payload: PayloadFormat | None,
    wanted: dict[tuple[str, int, int], torch.Tensor],
    bound: float,
) -> list[str]:
    runtime = RuntimeConfig(
        dispatcher=pair.dispatcher,
        executor=pair.executor,
        token_format=pair.token_format,
        payload=payload,
        max_tokens_per_rank=CAPACITY,
    )
    layer = layer_of(world, config, weights_of(config), runtime)
    layer.executor = NanOutput(layer.executor)
    layer.warmup()
    world.warm = True  # nothing may be allocated later
    problems = []
    for case in CASES:
        for call in range(case.num_calls):
            own = make_batch(case, call, world.rank, SIZE, config, torch.bfloat16)
            out = layer(own.hidden, own.topk, tokens_per_rank=case.counts.agreed)
            error = relative_error(out, wanted[case.name, call, world.rank])
            if not error <= bound:  # NaN counts as wrong
                problems.append(f"{case.name}, call {call}: {error:.2e}")
    layer.close()
    return problems
