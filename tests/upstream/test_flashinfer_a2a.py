"""Limits and signatures of the installed FlashInfer that `dispatch/flashinfer.py` builds on. Needs no GPU."""

from __future__ import annotations

import ctypes
import inspect
import re
import shutil
import subprocess

import pytest
from support.libraries import Later, folder, needs

from eprt.dispatch import DISPATCHERS
from eprt.dispatch.flashinfer import (
    ALIGNMENT,
    RECV_COUNTERS_OFFSET_INDEX,
    ROUTING_TABLE_WIDTH,
    ControlPlane,
    FlashInferGeometry,
)

pytestmark = needs("flashinfer")
library = Later("flashinfer.comm.trtllm_moe_alltoall")
SPEC = DISPATCHERS["flashinfer"]


@pytest.fixture(scope="module")
def source() -> dict[str, str]:
    """Text of the kernels' C++ files by name."""
    root = folder("flashinfer") / "data" / "csrc"
    wanted = ("trtllm_moe_alltoall.cu", "moeAlltoAllKernels.h", "moeAlltoAllKernels.cu", "moeAlltoAllMeta.h")
    return {name: next(root.rglob(name)).read_text() for name in wanted}


def constant(text: str, name: str) -> int:
    found = re.search(rf"\b{name}\s*=\s*(\d+)", text)
    assert found, f"{name} is gone from the source"
    return int(found[1])


def body(text: str, start: str, end: str) -> str:
    begin = text.index(start)
    return text[begin : text.index(end, begin)]


def test_rank_and_payload_limits(source):
    header = source["moeAlltoAllKernels.h"]
    # One bit of the mask must belong to no rank: the invalid id E is sent to "rank W".
    assert SPEC.max_ranks == constant(header, "kMaxRanks") - 1
    assert constant(header, "kMaxPayloads") >= 4  # data, scale, ids, weights
    assert constant(header, "kMaxTopK") == ROUTING_TABLE_WIDTH
    assert "kRankMaskWords = (kMaxRanks + 63) / 64" in header


def test_instantiated_top_k(source):
    switch = body(source["moeAlltoAllKernels.cu"], "#define SWITCH_TOP_K", "#define SWITCH_DTYPE")
    assert sorted(int(k) for k in re.findall(r"case (\d+):", switch)) == list(SPEC.top_k_sizes)


def test_the_invalid_id_is_sent_to_nobody(source):
    """With E a multiple of W: e // (E // W), which is W for E, looked up in the mask before anything is counted."""
    kernels = source["moeAlltoAllKernels.cu"]
    target = body(kernels, "int compute_target_rank_id", "\n}")
    assert "if (remainder == 0) {\n    return expert_id / base;" in target
    route = body(kernels, "int target_rank = compute_target_rank_id(expert_id", "__syncthreads()")
    order = [
        "is_valid = is_valid && is_rank_active(ptrs.active_rank_mask, target_rank)",
        "if (is_valid) {",
        "atomicAdd(&ptrs.send_counters[target_rank], 1)",
        "target_rank = -1",
    ]
    assert [route.index(text) for text in order] == sorted(route.index(text) for text in order)


def test_combine_reads_only_rows_that_were_sent(source):
    """So executors need not clear the others: `every_row_read` stays False."""
    kernels = source["moeAlltoAllKernels.cu"]
    assert "if (dst_idx < 0) {\n        acc[k].fill(0.0f);\n        continue;" in kernels
    assert "if (local_token_idx >= recv_counters[rank_idx]) return;" in kernels


def test_what_is_kept_from_ranks_left_out(source):
    """Neither counts nor flags go to them and nobody waits for theirs; so what they sent last stays counted, which is
    why `Workspace.resume` clears it, and their own call counter stays behind, which is why they can't come back."""
    kernels = source["moeAlltoAllKernels.cu"]
    skip = "is_rank_active(ptrs.active_rank_mask, {})) continue;\n        }}\n        {}"
    for who, what in (
        ("target_rank", "int send_count = ptrs.send_counters[target_rank];"),
        ("target_rank", "uint32_t* flag_addr = &ptrs.completion_flags[target_rank][rank_id];"),
        ("peer_rank", "bool flag_set = false;"),
        ("peer_rank", "uint32_t* flag_addr = &ptrs.completion_flags[peer_rank][rank_id];"),
    ):
        assert skip.format(who, what) in kernels
    assert "*flag_val_ptr = *flag_val_ptr + 1;" in kernels
    promise = " ".join((library.moe_a2a_dispatch.__doc__ or "").split())
    assert "merely restoring its mask bit is insufficient" in promise


def test_the_mask_is_an_argument_of_the_kernels(source):
    """So a CUDA graph keeps the one of its capture."""
    assert "CHECK_CPU(t);" in body(source["trtllm_moe_alltoall.cu"], "inline void resolveActiveRankMask", "\n}")
    assert "kernel_ptrs.active_rank_mask[w] = params.active_rank_mask[w];" in source["moeAlltoAllKernels.cu"]


def test_fp8_combine_rounds_in_place_at_the_strides_of_the_payload(source):
    """A rank takes its peers' rows to lie as its own do, packed or not; the room asked for is that of bf16 rows; the
    output is bf16."""
    kernels, host = source["moeAlltoAllKernels.cu"], source["trtllm_moe_alltoall.cu"]
    launch = body(kernels, "void moe_a2a_combine_launch", "\n}\n")
    assert "low_precision_staged = params.use_low_precision && (params.prepare_payload != nullptr)" in launch
    assert "? params.elements_per_token\n" in launch
    assert ": params.elements_per_token * static_cast<int>(sizeof(PayloadT));" in launch
    assert "reinterpret_cast<SrcT const*>(recv_buffer_bytes + token_offset);" in kernels
    assert "out[j] = DstT(static_cast<float>(in[j]));" in kernels  # no scale; __nv_fp8_e4m3 saturates
    assert "get_element_size(payload);  // includes all ranks * runtime_max_tokens_per_rank" in host
    assert '<< "low-precision combine must produce a bf16 output"' in host


def test_place_of_the_receive_counters(source):
    meta = body(source["moeAlltoAllMeta.h"], "enum MoeA2AMetaInfoIndex", "};")
    assert constant(meta, "RECV_COUNTERS_OFFSET_INDEX") == RECV_COUNTERS_OFFSET_INDEX


def test_where_payloads_and_combine_rows_lie(source):
    """Regions follow each other without padding; the combine offset is the caller's to give, checked for its size."""
    host = source["trtllm_moe_alltoall.cu"]
    assert constant(host, "kCachelineAlignment") == ALIGNMENT
    assert "offset += payloadByteSizes[payloadIdx];" in host
    assert "combinePayloadOffset + payloadBytes <= sizePerRank" in host
    assert "params.recv_buffers[targetRank] = targetWorkspacePtr + combinePayloadOffset;" in host


@pytest.fixture(scope="module")
def aux_data_size(source, tmp_path_factory):
    """The library's own `getMoeA2AAuxDataSize`, cut out of its source and compiled for the host."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler to run the library's own formula")
    host = source["trtllm_moe_alltoall.cu"]
    meta = source["moeAlltoAllMeta.h"].replace("#pragma once", "")
    top_k = constant(source["moeAlltoAllKernels.h"], "kMaxTopK")
    text = "\n".join(
        [
            "#include <array>\n#include <cstddef>\n#include <cstdint>",
            f"namespace tl_throughput {{ constexpr int kMaxTopK = {top_k}; }}",
            meta[: meta.rindex("}  // namespace torch_ext")] + "}",
            "namespace fi_throughput = torch_ext::moe_alltoall;",
            body(host, "constexpr size_t kCachelineAlignment", "inline int64_t outputScaleExtent"),
            body(host, "fi_throughput::MoeA2ADataOffsets calculateOffsets", "Tensor moeA2AInitializeOp"),
            'extern "C" int64_t aux(int64_t w, int64_t n) { return getMoeA2AAuxDataSize(w, n, 0); }',
        ]
    )
    folder = tmp_path_factory.mktemp("aux")
    (folder / "aux.cpp").write_text(text)
    subprocess.run(
        [compiler, "-std=c++17", "-shared", "-fPIC", str(folder / "aux.cpp"), "-o", str(folder / "aux.so")], check=True
    )
    function = ctypes.CDLL(str(folder / "aux.so")).aux
    function.argtypes, function.restype = [ctypes.c_int64, ctypes.c_int64], ctypes.c_int64
    return function


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8, 33, 63])
@pytest.mark.parametrize("tokens", [1, 7, 64, 4096])
def test_workspace_size_is_the_library_s(aux_data_size, monkeypatch, num_ranks, tokens):
    class Module:
        @staticmethod
        def moe_a2a_get_aux_data_size(ep_size, max_num_tokens, eplb_stats_num_experts):
            return aux_data_size(ep_size, max_num_tokens)

    monkeypatch.setattr("flashinfer.comm.trtllm_moe_alltoall.get_moe_alltoall_module", lambda *_: Module)
    for dispatch_bytes, combine_bytes in ((264, 256), (5792, 5760), (14400, 14336), (7456, 14336)):
        geometry = FlashInferGeometry(num_ranks, tokens, dispatch_bytes, combine_bytes)
        assert geometry.buffer_bytes == library.moe_a2a_get_workspace_size_per_rank(
            num_ranks, tokens, dispatch_bytes, combine_bytes
        )


def test_signatures():
    def names(function) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert names(library.moe_a2a_initialize)[:4] == ["workspace", "ep_rank", "ep_size", "max_num_tokens"]
    assert names(library.moe_a2a_dispatch)[:9] == [
        "token_selected_experts", "input_payloads", "workspace", "metainfo", "runtime_max_tokens_per_rank", "ep_rank",
        "ep_size", "top_k", "num_experts",
    ]  # fmt: skip
    assert names(library.moe_a2a_combine)[:9] == [
        "payload", "local_num_tokens", "workspace", "metainfo", "runtime_max_tokens_per_rank", "ep_rank", "ep_size",
        "top_k", "combine_payload_offset",
    ]  # fmt: skip
    assert {"enable_rank_mask", "active_rank_mask"} <= set(names(library.moe_a2a_dispatch))
    assert {"payload_in_workspace", "output", "use_low_precision", "enable_rank_mask", "active_rank_mask"} <= set(
        names(library.moe_a2a_combine)
    )
    assert library.moe_a2a_active_rank_mask(range(4), 4).tolist() == [0b1111]


def test_the_control_plane_speaks_the_library_s_protocol():
    abstractions = pytest.importorskip("flashinfer.comm.abstractions", reason="this FlashInfer has no protocol class")
    wanted = {name for name in vars(abstractions.CommBackend) if not name.startswith("_")}
    assert wanted <= set(dir(ControlPlane))
    for name in wanted:
        theirs = list(inspect.signature(getattr(abstractions.CommBackend, name)).parameters)
        assert list(inspect.signature(getattr(ControlPlane, name)).parameters) == theirs
