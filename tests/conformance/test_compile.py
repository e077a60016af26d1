"""torch.compile over parallelized models: no graph break, the same numbers."""

from __future__ import annotations

import pytest
import torch
from support.libraries import Later, needs

jobs = Later("support.jobs.compile_jobs")
pytestmark = needs("transformers")

# The same kernels on both sides; what is fused may be rounded elsewhere.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "model"), [(1, "gpt_oss"), (4, "qwen3_moe")])
def test_a_parallelized_model_compiles_whole(pools, size: int, model: str, dtype: torch.dtype) -> None:
    """`fullgraph=True` raises at a break."""
    found = pools(size).run(jobs.compare_compiled, name=model, dtype=dtype, timeout_s=380.0)
    assert len(found) == size
    assert max(error for error, _ in found) <= TOLERANCE[dtype], found
    assert all(said.startswith("UsageError: backward through an expert-parallel layer") for _, said in found), found


@pytest.mark.timeout(400)
def test_inductor_fuses_around_a_layer(pools) -> None:
    for errors in pools(1).run(jobs.by_inductor, timeout_s=380.0):
        assert max(errors) <= TOLERANCE[torch.float32], errors


def test_a_layer_is_called_although_nothing_reads_its_output(pools) -> None:
    assert pools(1).run(jobs.unused_output) == [1]


def test_compiled_calls_are_the_eager_ones(pools) -> None:
    ((hooked, by_itself, told),) = pools(1).run(jobs.like_eager)
    assert hooked, "hooks ran in the compiled code and in the operator"
    assert by_itself, "layer.compile() gave something else"
    assert told.startswith("InputError: routing is a tuple: expected TopK, RouterLogits or None")


def test_compiled_code_names_a_layer_that_is_gone(pools) -> None:
    (said,) = pools(1).run(jobs.refused)
    assert said.startswith("UsageError: compiled code calls layer")
