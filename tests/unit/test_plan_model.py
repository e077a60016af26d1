"""The cost model: each measured row against the model without it, published results it wasn't fitted to, its counts."""

from __future__ import annotations

import itertools
import random
from statistics import median

import pytest

from eprt.config import MoEConfig, ParallelConfig
from eprt.dispatch import DISPATCHERS
from eprt.experts import EXECUTORS
from eprt.plan import model
from eprt.plan.fitting import Sample, fit_of
from eprt.plan.machines import MACHINES, linked_ranks, machine_of
from eprt.support import Device

H200 = Device("cuda", 90)


def fitted_together(executor: str) -> dict[str, list[Sample]]:
    """Its formats with rows enough; all of its rows, where a format has too few."""
    groups = model.experts_groups(executor)
    own = {key: samples for key, samples in groups.items() if key[1] and fit_of(samples, model.EXPERTS_LEAST)}
    if len(own) < len(groups) - 1:
        own[executor, "all"] = groups[executor, ""]
    return {" ".join(key): samples for key, samples in own.items()}


SAMPLES = {
    **{name: (list(model.dispatch_samples(name)), model.DISPATCH_LEAST) for name in DISPATCHERS},
    **{key: (found, model.EXPERTS_LEAST) for name in EXECUTORS for key, found in fitted_together(name).items()},
}
MEASURED = [name for name, (samples, _) in SAMPLES.items() if samples]


def dot(a, b) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", MEASURED)
def test_a_row_that_was_left_out_is_foretold(name: str) -> None:
    """Median within 15%, worst within 30%. Fitted anew here without the row, and the rows are in microseconds."""
    samples, least = SAMPLES[name]
    errors = []
    for left_out in samples:
        fit = fit_of([s for s in samples if s is not left_out], least)
        assert fit is not None
        errors.append(abs(dot(fit.coefficients, left_out.terms) / left_out.us - 1))
    assert median(errors) <= 0.15
    assert max(errors) <= 0.30
    stated = fit_of(samples, least)
    assert stated is not None
    assert (stated.median_error, stated.worst_error) == pytest.approx((median(errors), max(errors)), rel=1e-6)


def test_every_dispatcher_and_the_hopper_executors_were_fitted() -> None:
    hopper = {"torch_grouped", "triton_grouped", "humming", "cutlass_mxfp4"}
    assert set(DISPATCHERS) | hopper <= {name.split()[0] for name in MEASURED}


# DeepEP's own low-latency results on H800 with CX7 400 Gb/s NICs (its docs/legacy.md): microseconds of dispatch and
# combine, 128 tokens a rank, hidden 7168, top-8, FP8 tokens there. None of it was fitted to.
@pytest.mark.parametrize(("ranks", "us"), [(16, 118 + 195), (32, 155 + 273), (64, 173 + 314), (128, 561), (256, 554)])
def test_published_times_over_rdma_are_foretold(ranks: int, us: float) -> None:
    config, parallel = MoEConfig(256, 8, 7168, 2048), ParallelConfig(ranks, ranks_per_host=8)
    found = model.dispatch_estimate(DISPATCHERS["deepep"], config, parallel, 128, H200, "fp8_block")
    assert found is not None
    assert found.us == pytest.approx(us, rel=0.15)
    assert found.basis == "modelled"
    assert "not measured" in found.why
    assert "RDMA at an assumed rate" in found.why


def test_ranks_of_a_token_are_those_of_drawn_experts() -> None:
    draw = random.Random(0)
    for E, K, parallel in (
        (128, 4, ParallelConfig(4)),
        (256, 8, ParallelConfig(64)),
        (64, 6, ParallelConfig(8, moe_tp_size=2)),
    ):
        L = E // parallel.ep_size
        drawn = [len({e // L for e in draw.sample(range(E), K)}) * parallel.moe_tp_size for _ in range(4000)]
        config = MoEConfig(E, K, 2048, 512)
        assert model.ranks_of_a_token(config, parallel) == pytest.approx(sum(drawn) / len(drawn), rel=0.02)


def test_bytes_are_split_between_the_links_as_each_dispatcher_sends() -> None:
    """Counted by hand: 4 ranks on 2 hosts, 8 tokens each, two experts a token that lie on two ranks always."""
    config, parallel = MoEConfig(4, 4, 2048, 512), ParallelConfig(4, ranks_per_host=2)
    row = 2 * 2048 + 8 * 4 + 2 * 2048
    for name, near, far in (("none", 8 * 3, 8 * 2 / 2), ("torch", 8 * 1, 8 * 2), ("deepep", 8 * 1, 8 * 2)):
        sent = model.sent_by(DISPATCHERS[name], config, parallel, 8, linked_ranks(parallel, H200), "bf16")
        assert (sent.link_bytes, sent.network_bytes) == (near * row, far * row), name


def test_links_of_hosts() -> None:
    assert linked_ranks(ParallelConfig(64), H200) == 64
    assert linked_ranks(ParallelConfig(64, ranks_per_host=8), H200) == 8
    assert linked_ranks(ParallelConfig(64, ranks_per_host=8), Device("cuda", 100)) == 64
    assert linked_ranks(ParallelConfig(128, ranks_per_host=8), Device("cuda", 100)) == 72


def test_a_generation_without_a_product_here_is_taken_as_the_one_before() -> None:
    assert machine_of(Device("cuda", 87)) is MACHINES[80]
    assert machine_of(Device("cuda", 61)) is None
    assert machine_of(Device("cpu")) is None


def test_more_work_never_takes_less() -> None:
    config = MoEConfig(256, 8, 7168, 2048, weight_format="nvfp4")
    parallel = ParallelConfig(16, ranks_per_host=8)
    sizes = (1, 8, 64, 512, 1024)
    for name, spec in DISPATCHERS.items():
        times = [model.dispatch_estimate(spec, config, parallel, tokens, H200, "bf16") for tokens in sizes]
        assert all(a and b and a.us < b.us for a, b in itertools.pairwise(times)), name
    for name, spec in EXECUTORS.items():
        if not spec.witness:
            times = [model.experts_estimate(spec, config, parallel, 16, tokens, H200) for tokens in sizes]
            assert all(a and b and a.us < b.us for a, b in itertools.pairwise(times)), name


def test_what_was_never_measured_is_called_assumed() -> None:
    config = MoEConfig(256, 8, 7168, 2048, weight_format="nvfp4")
    found = model.experts_estimate(EXECUTORS["trtllm_gen"], config, ParallelConfig(8), 32, 1024, Device("cuda", 100))
    assert found is not None
    assert (found.basis, found.here) == ("assumed", False)
    assert "never measured on any GPU" in found.why
    assert model.experts_estimate(EXECUTORS["reference"], config, ParallelConfig(8), 32, 1024, H200) is None
