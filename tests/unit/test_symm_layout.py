"""What of the symmetric-memory dispatcher can be held without a GPU: its layout, its kernels' code."""

from __future__ import annotations

import re

import pytest
import torch

from eprt.dispatch.symm.memory import ALIGNMENT, ENTRIES, MAX_RANKS, NUM_BUFFERS, REGIONS, SymmetricMemory, SymmGeometry


@pytest.mark.parametrize("payload", ["bf16", "fp8_block", "nvfp4"])
@pytest.mark.parametrize(("ranks", "capacity", "H", "K"), [(1, 1, 16, 1), (4, 77, 2880, 4), (8, 4096, 7168, 8)])
def test_regions_hold_every_row_and_do_not_overlap(ranks, capacity, H, K, payload):
    geometry = SymmGeometry(ranks, capacity, H, K, payload)
    rows = ranks * capacity
    edges = [0]
    for index in range(NUM_BUFFERS):
        start = geometry.buffer_start(index)
        assert start >= NUM_BUFFERS * ALIGNMENT  # the flags come first
        for region in REGIONS:
            first = start + geometry.offsets[region]
            assert first % ALIGNMENT == 0
            assert first >= edges[-1]
            edges.append(first + rows * geometry.row_bytes[region])
    assert edges[-1] <= geometry.num_bytes
    assert 2 * MAX_RANKS * 8 <= ALIGNMENT  # a buffer's flags fit
    rounding = NUM_BUFFERS * (len(REGIONS) + 1) * ALIGNMENT
    assert 0 <= geometry.num_bytes - capacity * geometry.bytes_per_token <= rounding


def test_rows_are_as_long_as_the_formats_say():
    """By hand: 7168 values, top-8."""
    sizes = {p: SymmGeometry(4, 1, 7168, 8, p).row_bytes for p in ("bf16", "fp8_block", "nvfp4")}
    assert sizes["bf16"] == {"data": 14336, "scale": 0, "ids": 32, "weights": 32, "output": 14336}
    assert (sizes["fp8_block"]["data"], sizes["fp8_block"]["scale"]) == (7168, 224)
    assert (sizes["nvfp4"]["data"], sizes["nvfp4"]["scale"]) == (3584, 448)


def test_the_host_reads_faults_on_the_host_whatever_device_is_torchs_default():
    geometry = SymmGeometry(1, 4, 128, 4, "bf16")
    bytes_ = torch.zeros(geometry.num_bytes, dtype=torch.uint8)
    with torch.device("meta"):  # as a program's "cuda", whose memory can't be pinned
        SymmetricMemory(geometry, 0, bytes_, [bytes_.data_ptr()]).raise_faults(1.0)


def test_views_lie_where_the_kernels_write_whatever_r_came_before(monkeypatch):
    """They are kept from call to call; some of those may come in inference mode, and later ones write."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **kwargs: zeros(*size, **kwargs))
    geometry = SymmGeometry(1, 64, 128, 4, "fp8_block")
    bytes_ = torch.zeros(geometry.num_bytes, dtype=torch.uint8)
    memory = SymmetricMemory(geometry, 0, bytes_, [bytes_.data_ptr()])
    for R, index, inference in ((8, 0, True), (8, 1, False), (64, 0, False), (8, 0, False), (8, 0, True)):
        with torch.inference_mode(inference):
            payload, (ids, weights) = memory.payload(index, R, None), memory.routing(index, R)
            found = {"data": payload.data, "scale": payload.scale, "ids": ids, "weights": weights}
            found["output"] = memory.output(index, R)
        assert list(found) == list(REGIONS)
        for region, rows in found.items():
            assert rows.data_ptr() == bytes_.data_ptr() + geometry.buffer_start(index) + geometry.offsets[region]
            assert rows.shape[0] == R
            assert rows.nbytes == R * geometry.row_bytes[region]
        found["output"].fill_(1.0)


# Triton and ptxas compile for a GPU that isn't there, so a lost wide access or a spill shows here.


def _compile(kernel, pointers: dict[str, str], constants: dict[str, int | str], arch: int, num_warps: int = 8):
    compiler = pytest.importorskip("triton.compiler", reason="needs triton: pip install triton")
    from triton.backends.compiler import GPUTarget

    integers = {"T": "i32", "R": "i32", "rank": "i32", "limit_ns": "i64", "peers": ("i64",) * constants["W"]}
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, integers.get(name, "i64"))
        for name in kernel.arg_names
    }
    names = list(kernel.arg_names)
    source = compiler.ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in ("rows", "out") if name in names},
    )
    return compiler.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": num_warps})


SIZES = [(4, 7168, 8, 90), (8, 2880, 4, 100)]  # W, H, K, architecture


def pushed(payload: str, W: int, H: int, K: int, arch: int) -> str:
    pytest.importorskip("triton", reason="needs triton: pip install triton")
    from eprt.dispatch.symm.kernels import dispatch_kernel
    from eprt.dispatch.symm.launch import PACKED_COLUMNS, TUNING

    words = {"WORDS": H // 2, "BLOCK": 4096} if payload == "bf16" else {"WORDS": H, "BLOCK": PACKED_COLUMNS}
    rows = ("*i32", "*i32") if payload == "bf16" else ("*bf16", "*fp32")
    assert {tuning.dispatch_warps for tuning in TUNING} == {4}
    return _compile(
        dispatch_kernel,
        {**TENSORS, "rows": rows[0], "global_scale": rows[1]},
        {**routing(W, K), **words, "PAYLOAD": payload},
        arch,
        num_warps=8 if payload == "bf16" else 4,
    ).asm["ptx"]


TENSORS = {"ids": "*i32", "weights": "*fp32", "book": "*i64", "state": "*i64"}


def routing(W: int, K: int) -> dict[str, int | str]:
    return {"E": 128, "L": 128 // W, "MOE_TP": 1, "W": W, "K": K, "K_POW2": K}


@pytest.mark.parametrize(("W", "H", "K", "arch"), SIZES)
def test_kernels_compile_with_wide_accesses(W, H, K, arch):
    push = pushed("bf16", W, H, K, arch)
    from eprt.dispatch.symm.kernels import combine_kernel

    constants = {**routing(W, K), "WORDS": H // 2, "BLOCK": 1024}
    pull = _compile(combine_kernel, {**TENSORS, "out": "*i32"}, constants, arch).asm["ptx"]
    assert len(re.findall(r"st\.global\.v4\.b32", push)) >= 4 * W  # each peer: 4096 words over 256 threads
    assert len(re.findall(r"ld\.global\.v4\.b32", pull)) == W
    for ptx in (push, pull):
        assert len(re.findall(r"st\.release\.sys", ptx)) == 1
        assert len(re.findall(r"ld\.acquire\.sys", ptx)) == 1
        assert ".local" not in ptx


@pytest.mark.parametrize(("payload", "codes"), [("fp8_block", r"st\.global\.v2\.b32"), ("nvfp4", r"st\.global\.b32")])
@pytest.mark.parametrize(("W", "H", "K", "arch"), SIZES)
def test_packed_rows_are_pushed_in_wide_accesses(W, H, K, arch, payload, codes):
    """Codes leave a warp as whole lines of 128 bytes: 8 or 4 bytes a thread, where 4 warps pack 1024 columns."""
    ptx = pushed(payload, W, H, K, arch)
    assert len(re.findall(codes, ptx)) >= W
    assert ".local" not in ptx


def test_the_kernels_index_the_book_as_the_memory_writes_it():
    pytest.importorskip("triton", reason="needs triton: pip install triton")
    from eprt.dispatch.symm import kernels as symm_kernels

    assert {name: getattr(symm_kernels, name.upper()).value for name in ENTRIES} == {
        name: line for line, name in enumerate(ENTRIES)
    }
