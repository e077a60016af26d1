"""What `eprt.launching` relies on in Triton: a compiled kernel's own launcher, and what it is given.

Kernels are compiled for an H200, which needs no GPU; the launch itself is recorded.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: pip install triton")

import triton
import triton.language as tl
from support.kernel_modules import kernel_modules
from support.processes import run_python
from support.stand_ins.kernel_device import INTERPRETED
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from eprt.launching import CachedKernel, like, name_callees_first, shared_cache, starts_aligned

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

DEVICE, STREAM = 78, 5  # no other test's


@triton.jit(do_not_specialize=["n"])
def add_kernel(x, scale, out, pair, n, step, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    column = tl.arange(0, BLOCK) * step
    value = tl.load(x + column, mask=column < n, other=0.0)
    if scale is not None:
        value *= tl.load(scale)
    tl.store(out + column, value + value if TWICE else value + pair[0] + pair[1], mask=column < n)


@triton.jit
def told_kernel(out, PDL: tl.constexpr):
    tl.store(out, 1.0 if PDL else 2.0)


@pytest.fixture
def runs(monkeypatch) -> list[tuple[object, ...]]:
    """What launchers were given."""
    seen: list[tuple[object, ...]] = []

    def load(kernel):
        if kernel.module is None:
            kernel.module, kernel.function = object(), 42
            kernel._run = lambda *given: seen.append(given)

    active = SimpleNamespace(
        get_current_device=lambda: DEVICE,
        get_current_stream=lambda _: STREAM,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        utils=SimpleNamespace(unload_module=lambda _: None),
    )
    monkeypatch.setattr(CompiledKernel, "_init_handles", load)
    monkeypatch.setattr(driver, "_active", active, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: DEVICE, raising=False)
    return seen


NAMES = """
import sys
from eprt.experts.grouped.gemm_gluon import grouped_gemm_warp_specialized
from eprt.experts.grouped.gemm_triton import grouped_gemm
from eprt.launching import name_callees_first

kernels = grouped_gemm, grouped_gemm_warp_specialized
for kernel in kernels[:: int(sys.argv[1])]:
    name_callees_first(kernel)
print(*(kernel.cache_key for kernel in kernels))
"""


def test_what_the_cache_knows_kernels_by_does_not_depend_on_their_order():
    """They call the same functions."""
    found = [run_python("-c", NAMES, order).stdout.split() for order in ("1", "-1")]
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_no_kernel_sees_two_constants_of_one_name():
    """Triton before 3.9 has them in a kernel's key in the order of their modules' addresses: half of all processes
    would find nothing of what another compiled."""
    modules = map(importlib.import_module, kernel_modules())
    kernels = {each for module in modules for each in vars(module).values() if isinstance(each, JITFunction)}
    assert len(kernels) > 100
    for kernel in kernels:
        name_callees_first(kernel)
        seen = {}
        for (name, _), (value, _) in kernel.used_global_vals.items():
            if isinstance(value, tl.constexpr):
                assert str(seen.setdefault(name, value)) == str(value), f"{kernel.__name__} sees two {name}"


def test_a_prepared_launch_is_tritons_own_without_its_search(runs):
    x, out = torch.zeros(64), torch.zeros(64)
    arguments, constants = (x, None, out, (16, 3), 7, 32), {"BLOCK": 64, "TWICE": False}
    given = torch.float32, None, torch.float32, (16, 3), 2, like(32)
    prepared = CachedKernel(add_kernel, torch.device("cuda", DEVICE), given, constants, num_warps=2)
    add_kernel[3, 2, 1](*arguments, **constants, enable_fp_fusion=True, num_warps=2)
    assert len(add_kernel.device_caches[DEVICE][0]) == 1, "Triton's own launch compiled another kernel"
    prepared((3, 2, 1), *arguments)
    theirs, ours = runs
    # grid, stream, function, packed metadata; then launch metadata and two hooks, which ours leaves out.
    assert theirs[:6] == ours[:6]
    assert theirs[:5] == (3, 2, 1, STREAM, 42)
    assert ours[6:9] == (None, None, None)
    assert len(theirs) == len(ours)
    assert all(a is b or a == b for a, b in zip(theirs[9:], ours[9:], strict=True))


def test_a_profiler_hears_of_prepared_launches(runs, monkeypatch):
    from triton import knobs

    given = torch.float32, None, torch.float32, (16, 3), 2, 1
    prepared = CachedKernel(add_kernel, torch.device("cuda", DEVICE), given, {"BLOCK": 32, "TWICE": True})
    hook = lambda _: None  # noqa: E731
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        prepared((1, 1, 1), torch.zeros(32), None, torch.zeros(32), (16, 3), 32, 1)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert runs[0][7] is knobs.runtime.launch_enter_hook


@pytest.mark.parametrize(("capability", "pdl"), [((9, 0), True), ((9, 0), False), ((8, 0), True)])
def test_a_kernel_that_is_launched_early_knows_it(capability, pdl, runs, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    prepared = CachedKernel(told_kernel, torch.device("cuda", DEVICE), (torch.float32,), {}, pdl=pdl)
    is_early = pdl and capability == (9, 0)
    assert prepared._kernel.metadata.launch_pdl == is_early
    assert prepared._constants == (is_early,)
    assert CachedKernel(told_kernel, torch.device("cuda", DEVICE), (torch.float32,), {})._constants == (False,)


@pytest.mark.parametrize(("number", "expected"), [(1, 1), (0, 16), (48, 16), (7, 2), (-32, 16), (1 << 31, None)])
def test_numbers_stand_for_those_that_triton_compiles_alike(number, expected):
    if expected is None:
        assert like(number) >= 1 << 31
    else:
        assert like(number) == expected


def test_alignment_is_that_of_all():
    x = torch.zeros(64, dtype=torch.bfloat16)
    assert starts_aligned(x, x[8:])
    assert not starts_aligned(x, x[1:])


@pytest.mark.parametrize("inductor", [None, "elsewhere"])
def test_what_inductor_does_to_tritons_cache_is_undone_while_we_compile(inductor, monkeypatch, tmp_path):
    """Its CachingAutotuner sets TRITON_CACHE_DIR to `triton_cache_dir` of its GPU, for the rest of the process."""
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    if inductor:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / inductor))
    usual = knobs.cache.dir
    for chosen, meanwhile in (
        (None, usual),
        (triton_cache_dir(1), usual),
        (str(tmp_path / "of the user"), str(tmp_path / "of the user")),
    ):
        if chosen:
            monkeypatch.setenv("TRITON_CACHE_DIR", chosen)
        with contextlib.suppress(KeyError), shared_cache():
            assert knobs.cache.dir == meanwhile
            raise KeyError
        assert os.environ.get("TRITON_CACHE_DIR") == chosen
        monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
