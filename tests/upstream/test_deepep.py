"""Signatures and limits of the installed DeepEP, read from its Python source: its extension needs CUDA and NVSHMEM.

The wheel is for Python 3.12 only; elsewhere its source can be unpacked for this test with
`pip install --no-deps --only-binary=:all: --python-version 3.12 --target FOLDER tokenspeed-deepep==1.2.1.post20251110`
and FOLDER on PYTHONPATH.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from eprt.dispatch import DISPATCHERS, deepep

SPEC = DISPATCHERS["deepep"]


def _folder() -> Path | None:
    found = importlib.util.find_spec("deep_ep")  # finds, doesn't import
    return Path(found.submodule_search_locations[0]) if found and found.submodule_search_locations else None


FOLDER = _folder()
pytestmark = pytest.mark.skipif(FOLDER is None, reason="deep_ep (tokenspeed-deepep, Python 3.12) is not installed")


@pytest.fixture(scope="module")
def buffer() -> ast.ClassDef:
    assert FOLDER is not None
    module = ast.parse((FOLDER / "buffer.py").read_text())
    return next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "Buffer")


def method(buffer: ast.ClassDef, name: str) -> ast.FunctionDef:
    return next(node for node in buffer.body if isinstance(node, ast.FunctionDef) and node.name == name)


def arguments(buffer: ast.ClassDef, name: str) -> list[str]:
    return [a.arg for a in method(buffer, name).args.args if a.arg != "self"]


def test_constructor(buffer):
    names = arguments(buffer, "__init__")
    assert names[0] == "group"
    assert {"num_rdma_bytes", "low_latency_mode", "num_qps_per_rank", "explicitly_destroy"} <= set(names)
    defaults = dict(zip(reversed(names), reversed(method(buffer, "__init__").args.defaults), strict=False))
    # Relied on: NVLink carries low-latency messages within a host, and a slow rank isn't dropped silently.
    assert ast.literal_eval(defaults["allow_nvlink_for_low_latency_mode"]) is True
    assert ast.literal_eval(defaults["enable_shrink"]) is False


def test_dispatch_and_combine(buffer):
    assert arguments(buffer, "low_latency_dispatch")[:4] == [
        "x", "topk_idx", "num_max_dispatch_tokens_per_rank", "num_experts",
    ]  # fmt: skip
    assert {"use_fp8", "return_recv_hook", "use_ue8m0"} <= set(arguments(buffer, "low_latency_dispatch"))
    assert arguments(buffer, "low_latency_combine")[:4] == ["x", "topk_idx", "topk_weights", "handle"]
    assert arguments(buffer, "get_low_latency_rdma_size_hint") == [
        "num_max_dispatch_tokens_per_rank", "hidden", "num_ranks", "num_experts",
    ]  # fmt: skip
    for name, count in (("low_latency_dispatch", 5), ("low_latency_combine", 3)):
        returned = method(buffer, name).body[-1]
        assert isinstance(returned, ast.Return)
        assert isinstance(returned.value, ast.Tuple)
        assert len(returned.value.elts) == count


def test_rank_mask(buffer):
    """Polarity, and that only a buffer made for it has one."""
    assert "enable_shrink" in arguments(buffer, "__init__")
    assert arguments(buffer, "low_latency_update_mask_buffer") == ["rank_to_mask", "mask"]
    update = ast.get_docstring(method(buffer, "low_latency_update_mask_buffer"))
    assert update is not None
    assert "if True, will mask the rank (do not recvfrom/sendto the rank)" in update
    assert arguments(buffer, "low_latency_query_mask_buffer") == ["mask_status"]
    query = ast.get_docstring(method(buffer, "low_latency_query_mask_buffer"))
    assert query is not None
    assert "`[num_ranks]` with `torch.int`" in query
    assert "`1` means mask and `0` means unmasked" in query


def test_combine_waits_for_whole_slabs_only(buffer):
    """Why the down GEMM doesn't overlap the combine: there is no argument for per-tile signals or an SM count. If this
    fails, pass them: FlashInfer 0.7.2's `grouped_gemm_nt_masked` has them (`test_flashinfer_sm100.py`)."""
    assert set(arguments(buffer, "low_latency_combine")) == {
        "x", "topk_idx", "topk_weights", "handle",
        "use_logfmt", "zero_copy", "async_finish", "return_recv_hook", "out", "combine_wait_recv_cost_stats",
    }  # fmt: skip


def test_what_its_documentation_promises(buffer):
    text = ast.get_docstring(method(buffer, "low_latency_dispatch"))
    assert text is not None
    flat = " ".join(text.split())
    assert "you cannot hold more than 2 low-latency kernels' result tensors" in flat
    assert deepep.MAX_OPEN == 2
    assert "`-1` indices (not selecting any expert) are supported" in flat
    assert "`[num_local_experts, num_max_dispatch_tokens_per_rank * num_ranks, hidden // 128]`" in flat
    assert "last-two-dimension of the scaling tensors are in column-major" in flat


def test_queue_depth(buffer):
    source = ast.unparse(method(buffer, "low_latency_dispatch"))
    assert "assert self.nvshmem_qp_depth >= (num_max_dispatch_tokens_per_rank + 1) * 2" in source
    assert f"'{deepep.QP_DEPTH_VARIABLE}', '1024'" in ast.unparse(method(buffer, "__init__"))


def test_limits_in_the_binary():
    """The sizes a kernel is instantiated for are template arguments: part of its symbols."""
    assert FOLDER is not None
    binary = next(iter(FOLDER.parent.glob("deep_ep_cpp*.so")), None)
    if binary is None:
        pytest.skip("the extension isn't beside the package")
    data = binary.read_bytes()
    for hidden in SPEC.hidden_sizes:
        assert any(f"Li{hidden}E".encode() in line for line in _symbols(data, b"internode_ll")), hidden


def _symbols(data: bytes, word: bytes) -> list[bytes]:
    return [part for part in data.split(b"\0") if word in part and part.startswith(b"_Z")]
