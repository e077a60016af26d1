"""humming without a GPU: an H200 described to it, nothing compiled, and stand-ins for its two operators.

The stand-ins compute in torch what humming documents of its operators, on the tensors that its transform would have
been given, decoded by the reference executor's decoder. Which kernel a launch asks for is looked up in the table the
launch carries, as humming's launcher does, and checked against the layout that comes with it.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from types import SimpleNamespace

import pytest
import torch

from eprt.experts.reference import activation_forward, decode_matrix
from eprt.weights import Fp8Block, Mxfp4, Nvfp4

H200 = SimpleNamespace(
    index=0,
    name="NVIDIA H200",
    is_ppu=False,
    sm_count=132,
    max_threads_per_block=1024,
    max_threads_per_sm=2048,
    max_registers_per_sm=65536,
    sm_major=9,
    sm_minor=0,
    sm_version=90,
    l2_cache_size=50 << 20,
    default_smem_size=48 << 10,
    max_smem_size=227 << 10,
    memory_bandwidth_gbps=4800.0,
    tensorcore_tops={"float16": 989.0, "bfloat16": 989.0, "float8e4m3": 1979.0},
)
KERNELS = {}  # id -> the kernel object that humming would have compiled
_ids = itertools.count(1)  # several threads register kernels at once


def _register(self) -> None:
    self.kernel_id = next(_ids)
    KERNELS[self.kernel_id] = self


@contextlib.contextmanager
def described_h200(folder):
    """humming believes in an H200 and compiles nothing; its own checks of every kernel run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HUMMING_DISABLE_PARALLEL_BUILD", "1")  # importing it would start a compiler
        patch.setenv("HUMMING_CACHE_DIR", str(folder))
        installed = pytest.importorskip("humming", reason="humming-kernels isn't installed")
        from humming import transform
        from humming.config import config as layer_config
        from humming.device import DeviceInfo, current_device
        from humming.kernel.humming import HummingKernel
        from humming.kernel.process_input import ProcessInputKernel

        info = object.__new__(DeviceInfo)
        info._index, info._value = 0, H200
        patch.setitem(DeviceInfo._instances, 0, info)
        patch.setattr(current_device, "_value", H200)
        for module in (transform, layer_config):
            patch.setattr(module, "DeviceInfo", lambda *_: H200)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "device", lambda *_: contextlib.nullcontext())
        compiler = type("Compiler", (), {"signature": staticmethod(lambda: "nvcc+13.0")})
        patch.setattr(HummingKernel, "_get_compiler", staticmethod(lambda: compiler))
        for kind in (HummingKernel, ProcessInputKernel):
            patch.setattr(kind, "prepare", lambda self: None)
            patch.setattr(kind, "register_kernel", _register)
        yield installed


class Launches:
    """The two operators; `gemms` holds (gemm type, expected rows, block shape) of each launch."""

    def __init__(self) -> None:
        self.gemms = []
        self.stream = 7

    def install(self, patch) -> None:
        patch.setattr("humming.transform.transform_humming_tensors", lambda config, tensors, padded: tensors)
        patch.setattr(torch.ops.humming, "launch_kernel", SimpleNamespace(out=self.gemm), raising=False)
        rows = SimpleNamespace(default=self.rows)
        patch.setattr(torch.ops.humming, "launch_process_input", rows, raising=False)
        patch.setattr("eprt.experts.activation_triton.activate_rows", activate_rows)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda *_: self.stream, raising=False)

    def gemm(self, table, a, b, bs, bs2, a_scale, a_scale2, bzp, bias, c, ids, experts, padded, layout, locks, *rest):
        top_k, expected, check = rest
        assert (top_k, check) == (1, False)
        assert all(unused is None for unused in (a_scale, a_scale2, bzp, ids, experts, padded))
        assert locks.is_contiguous()
        assert not locks.any()
        kernel = KERNELS[_row(table, expected)]
        if kernel.estimated_smem_size > H200.max_smem_size:
            raise RuntimeError("cuFuncSetAttribute failed with error: CUDA_ERROR_INVALID_VALUE (invalid argument)")
        self.gemms.append((kernel.gemm_type.value, expected, tuple(kernel.block_shape)))
        columns, inner = kernel.shape_n - kernel.pad_shape_n, kernel.shape_k - kernel.pad_shape_k
        assert a.shape == (c.shape[0], inner)
        assert c.shape[1] == columns
        matrix = _decode(kernel, b, bs, bs2)[:, :columns, :inner]
        for e, rows in enumerate(_groups(kernel.gemm_type.value, layout, a.shape[0])):
            y = a[rows].float() @ matrix[e].T
            c[rows] = (y if bias is None else y + bias[e, :columns].float()).to(c.dtype)

    def rows(self, table, rows, out, group_scales, token_scales, expert_tokens, scatter_idx, num_valid) -> None:
        assert group_scales is token_scales is None
        kernel = KERNELS[_row(table, rows.shape[0])]
        out.fill_(float("nan"))
        if scatter_idx is not None:
            assert kernel.layout.value == "scatter"
            assert scatter_idx.shape == (rows.shape[0], kernel.scatter_width)
            assert out.shape[0] >= scatter_idx.numel()
            assert expert_tokens is num_valid is None
            source, slot = ((scatter_idx >= 0) & (scatter_idx < scatter_idx.numel())).nonzero(as_tuple=True)
            out[scatter_idx[source, slot].long()] = rows[source]
            return
        if expert_tokens is not None:
            assert kernel.layout.value == "grouped_mask"
            groups = _groups("grouped_masked", expert_tokens, rows.shape[0])
        else:
            assert kernel.layout.value == "normal"
            groups = [slice(0, int(num_valid))]
        for group in groups:
            out[group] = _evaluate(kernel, rows[group].float()).to(out.dtype)


def activate_rows(activation, wide, counts, narrow) -> None:
    """In place of the Triton kernel; rows past the counts stay garbage."""
    valid = torch.arange(wide.shape[1]) < counts[:, None]
    narrow[valid] = activation_forward(activation, wide[valid].float()).to(narrow.dtype)


def _row(table, rows) -> int:
    """The kernel of the interval from < rows <= to, as the launcher finds it."""
    for low, high, kernel, _ in table.view(-1, 4).tolist():
        if low < rows <= high:
            return kernel
    raise AssertionError(f"{rows} rows are in no interval of {table.tolist()}")


def _groups(gemm_type, layout, num_rows):
    if gemm_type == "grouped_contiguous":
        assert layout.dtype == torch.int64
        ends = layout.tolist()
        assert ends[0] == 0
        assert ends[-1] <= num_rows
        return [slice(low, high) for low, high in itertools.pairwise(ends)]
    assert layout.dtype == torch.int32
    slab = num_rows // len(layout)
    assert 0 <= int(layout.min()) <= int(layout.max()) <= slab
    return [slice(e * slab, e * slab + count) for e, count in enumerate(layout.tolist())]


def _decode(kernel, weight, scale, second):
    if str(kernel.b_dtype) == "float8e4m3":
        return decode_matrix(Fp8Block(weight.view(torch.float8_e4m3fn), scale), 1)
    if str(kernel.bs_dtype) == "float8e8m0":
        return decode_matrix(Mxfp4(weight.view(torch.uint8), scale.view(torch.uint8)), 1)
    plain = decode_matrix(Nvfp4(weight.view(torch.uint8), scale, torch.ones(len(weight), 1)), 1)
    return plain * second.float().reshape(len(weight), -1, 1)


def _evaluate(kernel, rows):
    """The kernel's C++ expression of a and b, over tensors."""
    a, b = rows.chunk(2, dim=1) if kernel.activation_type.value == "binary_split" else (rows, None)
    text = re.sub(r"(\d)f\b", r"\1", kernel.activation_impl).replace("__expf", "exp")
    text = re.sub(r"(.*) \? (.*) : (.*)", r"where(\1, \2, \3)", text)

    def least(x, y):
        return torch.minimum(*torch.broadcast_tensors(torch.as_tensor(x), torch.as_tensor(y)))

    def most(x, y):
        return -least(-torch.as_tensor(x), -torch.as_tensor(y))

    return eval(text, {"exp": torch.exp, "fminf": least, "fmaxf": most, "where": torch.where}, {"a": a, "b": b})
