"""The grouped GEMM executor against the float32 witness, in both its ways of computing FlatTokens."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.cases import expert_cases as cases
from torch.utils._python_dispatch import TorchDispatchMode

from eprt import quant
from eprt.activation import activated
from eprt.config import Activation, MoEConfig
from eprt.conformance.oracle import relative_error, shard_weights
from eprt.experts import torch_grouped
from eprt.experts.reference import ReferenceExecutor
from eprt.experts.torch_grouped import GroupedExecutor
from eprt.tokens import ExpertMajorTokens, FlatTokens, Payload
from eprt.weights import ExpertWeights

# Both sides sum the same float32 products in another order.
F32_TOLERANCE = 1e-5
# The tokens, the weights (where their format isn't exact in bf16) and the values between the GEMMs are rounded to
# bf16, 2 ** -9 each, and both GEMMs' outputs once more: in norm about 4e-3. Sums are float32.
BF16_TOLERANCE = 1e-2


@pytest.fixture(params=["sorted", "dense"])
def kernel(request, monkeypatch) -> str:
    """`dense` is what runs on a GPU for which grouped_mm would synchronise."""
    if request.param == "dense":
        monkeypatch.setattr(torch_grouped, "has_grouped_kernel", lambda device, dtype: False)
    return request.param


def pair(config: MoEConfig, weights: ExpertWeights, **where) -> tuple[GroupedExecutor, ReferenceExecutor]:
    shard = cases.shard_of(config, **where)
    return tuple(
        kind(config, shard, weights, cases.CPU, cases.RUNTIME) for kind in (GroupedExecutor, ReferenceExecutor)
    )


def error_on_flat(executor: GroupedExecutor, reference: ReferenceExecutor, flat: FlatTokens) -> float:
    """Every row is read; outputs start as NaN."""
    flat = replace(flat, every_row_read=True)
    shape, dtype = (flat.num_rows, flat.hidden.hidden_size), torch.float32
    if flat.hidden.format != "f32":
        dtype = torch.bfloat16
    actual = executor(flat, torch.full(shape, cases.NAN, dtype=dtype))
    return relative_error(actual, reference(flat, torch.full(shape, cases.NAN, dtype=dtype)))


def error_on_slabs(executor: GroupedExecutor, reference: ReferenceExecutor, slabs: ExpertMajorTokens) -> float:
    valid = cases.valid_rows(slabs)
    out = torch.full_like(slabs.hidden.data, cases.NAN)
    return relative_error(executor(slabs, out)[valid], reference(slabs)[valid])


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("activation", cases.ACTIVATIONS.values(), ids=cases.ACTIVATIONS)
@pytest.mark.parametrize(("H", "I"), [(96, 64), (96, 24), (100, 20), (33, 7)])
def test_float32(kernel: str, H: int, I: int, activation, bias: bool):
    """Sizes that no 16-byte row holds are padded inside."""
    config = cases.make_config(hidden_size=H, intermediate_size=I, activation=activation, bias=bias)
    executor, reference = pair(config, cases.make_dense(config))
    flat = cases.make_flat(config)
    assert error_on_flat(executor, reference, flat) < F32_TOLERANCE
    assert error_on_slabs(executor, reference, cases.make_expert_major(flat, cases.shard_of(config))) < F32_TOLERANCE


@pytest.mark.parametrize("name", ["bf16", "mxfp4", "mxfp8", "nvfp4", "fp8_tensor", "fp8_block", "fp8_channel", "int4"])
@pytest.mark.parametrize("activation", [cases.GPT_OSS, cases.RELU2], ids=["gpt_oss", "relu2"])
def test_every_weight_format(kernel: str, name: str, activation):
    config = cases.make_config(name, activation=activation, bias=True)
    executor, reference = pair(config, cases.make_weights(config))
    flat = cases.make_flat(config, dtype=torch.bfloat16)
    assert error_on_flat(executor, reference, flat) < BF16_TOLERANCE
    assert error_on_slabs(executor, reference, cases.make_expert_major(flat, cases.shard_of(config))) < BF16_TOLERANCE


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"weight_format": "f32", "activation": Activation("geglu"), "bias": True}, torch.float32),
        ({"weight_format": "bf16", "intermediate_size": 24, "hidden_size": 90, "bias": True}, torch.bfloat16),
        ({"weight_format": "bf16", "intermediate_size": 40, "hidden_size": 90, "bias": True}, torch.bfloat16),
        ({"weight_format": "bf16"}, torch.float32),
        ({"weight_format": "f32"}, torch.bfloat16),
    ],
)
def test_odd_sizes_and_tokens_in_another_dtype_than_the_weights(kernel: str, changes: dict, dtype: torch.dtype):
    config = cases.make_config(**changes)
    executor, reference = pair(config, cases.make_weights(config))
    assert error_on_flat(executor, reference, cases.make_flat(config, 64, dtype=dtype)) < BF16_TOLERANCE


@pytest.mark.parametrize("name", ["fp8_block", "nvfp4"])
def test_packed_tokens(kernel: str, name: str):
    config = cases.make_config("bf16", bias=True)
    executor, reference = pair(config, cases.make_weights(config))
    flat = cases.make_flat(config)
    packed = replace(flat, hidden=quant.encode_payload(flat.hidden.data, name))
    assert error_on_flat(executor, reference, packed) < BF16_TOLERANCE
    slabs = cases.make_expert_major(flat, cases.shard_of(config))
    packed_slabs = ExpertMajorTokens(quant.encode_payload(slabs.hidden.data, name), slabs.counts)
    valid = cases.valid_rows(slabs)
    assert relative_error(executor(packed_slabs)[valid], reference(packed_slabs)[valid]) < BF16_TOLERANCE


def test_rows_without_a_local_expert_are_zero_whatever_they_hold(kernel: str):
    config = cases.make_config("bf16", bias=True)
    flat = replace(cases.make_flat(config, dtype=torch.bfloat16), every_row_read=True)
    where = {"rank": 1, "world_size": 2}
    executor, _ = pair(
        config, shard_weights(cases.make_weights(config), config, cases.shard_of(config, **where)), **where
    )
    mine = cases.rows_with_expert(flat, cases.shard_of(config, **where))
    assert 0 < int(mine.sum()) < flat.num_rows
    flat.hidden.data[~mine] = float("inf")
    out = executor(flat, torch.full_like(flat.hidden.data, cases.NAN))
    assert (out[~mine] == 0).all()
    assert out.isfinite().all()


def test_all_slots_invalid_and_zero_rows(kernel: str):
    config = cases.make_config("bf16", bias=True)
    executor, _ = pair(config, cases.make_weights(config))
    flat = cases.make_flat(config, 6, dtype=torch.bfloat16)
    nothing = replace(flat, ids=torch.full_like(flat.ids, config.num_experts), every_row_read=True)
    assert (executor(nothing, torch.full_like(flat.hidden.data, cases.NAN)) == 0).all()
    assert executor(cases.make_flat(config, 0, dtype=torch.bfloat16)).shape == (0, 96)
    no_rows = ExpertMajorTokens(Payload.plain(torch.empty(4, 0, 96)), torch.zeros(4, dtype=torch.int32))
    assert executor(no_rows).shape == (4, 0, 96)


def test_one_expert_takes_all_rows_and_repeats_count_twice(kernel: str):
    config = cases.make_config()
    executor, reference = pair(config, cases.make_dense(config))
    flat = cases.make_flat(config, 7)
    same = FlatTokens(
        Payload.plain(flat.hidden.data.nan_to_num(1.0)),
        torch.full_like(flat.ids, 2),
        torch.rand(7, 2),
        flat.num_experts,
    )
    assert error_on_flat(executor, reference, same) < F32_TOLERANCE


@pytest.mark.parametrize(
    ("activation", "hidden", "expected"),
    [
        (cases.GPT_OSS, [-10.0, -9.0], -10 / (1 + math.exp(17.02)) * -6),  # gate has no lower clamp, up has one
        (cases.GPT_OSS, [10.0, 9.0], 7 / (1 + math.exp(-7 * 1.702)) * 8),
        (cases.RELU2, [-3.0, 3.0], [0.0, 9.0]),
    ],
)
def test_activation_by_hand(activation, hidden: list[float], expected):
    """SiLU hides a wrong lower clamp of the gate from every comparison of sums."""
    gate, up = torch.tensor(hidden).chunk(2) if activation.gated else (None, torch.tensor(hidden))
    actual = activated(activation, gate, up).tolist()
    assert actual == pytest.approx(expected if isinstance(expected, list) else [expected], rel=1e-5)


def test_weights_are_not_kept():
    config = cases.make_config("bf16", bias=True)
    weights, flat = cases.make_weights(config), cases.make_flat(config, dtype=torch.bfloat16)
    executor, reference = pair(config, weights)
    expected = reference(replace(flat, every_row_read=True))
    for tensor in (weights.gate_up.data, weights.down.data, weights.gate_up_bias, weights.down_bias):
        tensor.fill_(cases.NAN)
    assert relative_error(executor(flat), expected) < BF16_TOLERANCE


# Operators that read values on the host, or whose output shape depends on values.
SYNCHRONISING = (
    "_local_scalar_dense", "nonzero", "bincount", "masked_select", "unique", "equal", "repeat_interleave.Tensor",
)  # fmt: skip


class Recorder(TorchDispatchMode):
    """Names and output shapes of every operator called under it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        outputs = result if isinstance(result, tuple | list) else [result]
        shapes = tuple(tuple(t.shape) for t in outputs if isinstance(t, torch.Tensor))
        self.calls.append((str(func), shapes))
        masks = [t for a in args if isinstance(a, list | tuple) for t in a if isinstance(t, torch.Tensor)]
        if "index" in str(func) and any(t.dtype == torch.bool for t in masks):
            self.calls.append(("boolean mask nonzero", ()))
        return result


def operators(executor, tokens) -> list[tuple[str, tuple]]:
    shape = (*tokens.hidden.data.shape[:-1], tokens.hidden.hidden_size)
    out = torch.empty(shape, dtype=torch.bfloat16)
    with Recorder() as recorder:
        executor(tokens, out)
    return recorder.calls


def is_synchronising(calls: list[tuple[str, tuple]]) -> bool:
    return any(word in name for name, _ in calls for word in SYNCHRONISING)


@pytest.mark.parametrize("payload", ["bf16", "fp8_block", "nvfp4"])
def test_operators_do_not_depend_on_the_routing_and_read_nothing_back(kernel: str, payload: str):
    config = cases.make_config("bf16", bias=True, activation=cases.GPT_OSS)
    executor, reference = pair(config, cases.make_weights(config))
    seen = []
    for seed, ids in [(0, None), (1, None), (2, 4), (3, 0)]:
        flat = cases.make_flat(config, 9, seed=seed)
        if ids is not None:  # all invalid; all to expert 0
            flat = replace(flat, ids=torch.full_like(flat.ids, ids))
        flat = replace(flat, hidden=quant.encode_payload(flat.hidden.data, payload))
        seen.append(operators(executor, flat))
    assert seen[0] == seen[1] == seen[2] == seen[3]
    assert any("mm" in name for name, _ in seen[0])
    assert not is_synchronising(seen[0])
    assert is_synchronising(operators(reference, flat)), "the recorder must see a sync where there is one"
    slabs = [
        cases.make_expert_major(cases.make_flat(config, 9, seed=seed, dtype=torch.bfloat16), cases.shard_of(config))
        for seed in (0, 1)
    ]
    calls = [operators(executor, slab) for slab in slabs]
    assert calls[0] == calls[1]
    assert not is_synchronising(calls[0])
