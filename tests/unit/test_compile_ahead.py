"""Kernels that other processes compile ahead are those that a warm-up asks for, and it finds them in Triton's cache."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
from support.builders import live_tensors
from support.kernel_modules import kernel_modules
from support.processes import wait_until_gone

pytest.importorskip("triton", reason="triton isn't installed")

from triton import knobs
from triton.runtime import driver

from eprt import compile_ahead
from eprt.bench.experts import random_experts
from eprt.cli.explain import kinds_of_layers
from eprt.config import MoEConfig, ParallelConfig, Routing, RuntimeConfig
from eprt.conformance.tiny_model import gpt_oss_config
from eprt.experts import sort_by_expert_triton
from eprt.experts.grouped import TritonGroupedExecutor
from eprt.experts.permute_triton import _copy_rows
from eprt.launching import CachedKernel, Specialization, recording, shared_cache
from eprt.placement import ExpertPlacement
from eprt.routing.launch import FusedRouter, Rounding
from eprt.support import Device, compiled_for

ROOT = Path(__file__).parents[2]
SM90 = Device("cuda", 90)
META = torch.device("meta")
FLOATS = torch.float32, torch.float32
GPT_OSS = gpt_oss_config(1, 8, 2, 256, 128)  # of eight experts, top-2

ONE_DIES = """
import os
from eprt import compile_ahead
plain = compile_ahead._compile
compile_ahead._compile = lambda *job: os._exit(3) if "float32" in str(job) else plain(*job)
compile_ahead.serve()
"""
NEVER_ANSWERS = """
import os, subprocess, time
with open(os.environ["EPRT_TEST_SEEN"], "w") as seen:
    print(os.getpid(), subprocess.Popen(["sleep", "900"]).pid, file=seen)
time.sleep(900)
"""
WHAT_IS_FORKED = """
import os, torch
asked, fork = [], os.fork
torch._C._cuda_init = torch._C._cuda_getDeviceCount = lambda: asked.append("cuda") or 0
from triton.runtime import driver
from eprt.compile_ahead import serve
def seen():
    with open(os.environ["EPRT_TEST_SEEN"], "w") as text:
        print(len(os.listdir("/proc/self/task")), asked, torch.cuda.is_initialized(), file=text)
    return fork()
os.fork = seen
serve()
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of the test's own, and Triton's driver as it was."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(driver, "_active", None)


@pytest.fixture
def launched_nowhere(monkeypatch):
    """Compiles as for a Hopper GPU, launches nothing; returns whether each kernel was in the cache."""
    found = []
    compile_ahead.compile_for(90)
    monkeypatch.setattr(knobs.compilation, "listener", lambda **compiled: found.append(compiled["cache_hit"]))
    monkeypatch.setattr(CachedKernel, "_load", lambda kernel: kernel._specialization.compile() and (lambda *_: None))
    monkeypatch.setattr(CachedKernel, "__call__", lambda *_: None)
    return found


def copy_of(dtype, width=64):
    named = {"K": 2, "K_PAD": 2, "BLOCK_H": width}
    return Specialization(_copy_rows, (dtype, dtype, torch.int32, 16), named)


def eprt_warm(model):
    command = [sys.executable, "-m", "eprt", "warm", "--model", str(model), "--max-tokens-per-rank", "1", "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=500)
    return json.loads(done.stdout)


def test_a_warm_up_compiles_nothing_after_eprt_warm(tmp_path, launched_nowhere):
    """The same layer, without a GPU: its own warm-up finds every kernel."""
    model = tmp_path / "config.json"
    model.write_text(json.dumps(GPT_OSS))
    first, again = eprt_warm(model), eprt_warm(model)
    assert first["compiled"] > 4
    assert again["compiled"] == 0
    with compiled_for(SM90):
        an_executor().warmup(1)
    assert len(launched_nowhere) >= first["compiled"]
    assert all(launched_nowhere)


def test_tools_that_inductor_sets_in_this_process_change_no_key(tmp_path, launched_nowhere):
    """torch.compile has Triton use CUDA's own device library from then on; kernels compiled ahead are still found."""
    assert compile_ahead.Compilation([copy_of(torch.bfloat16)], SM90, 1, fewest=1).wait() == 1
    library = tmp_path / "nvvm" / "libdevice" / "libdevice.10.bc"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"another version")
    with knobs.nvidia.scope():
        knobs.nvidia.libdevice_path = str(library)
        copy_of(torch.bfloat16).compile()
        assert knobs.nvidia.libdevice_path == str(library)
    assert launched_nowhere == [True]


def test_a_layer_needs_the_same_kernels_whatever_the_default_dtype():
    """vLLM has another while it builds the model than in its first step."""

    def marks(default):
        before = torch.get_default_dtype()
        with compiled_for(SM90), recording() as found:
            executor = an_executor()
            torch.set_default_dtype(default)
            try:
                executor.warmup(4096)
                return {compile_ahead._mark(each, SM90) for each in found}
            finally:
                torch.set_default_dtype(before)

    known = marks(torch.float32)
    assert known >= marks(torch.bfloat16)  # without those that all layers of this process share


TORCHS = str(Path(torch.__file__).parent / "bin" / "ptxas")


@pytest.mark.parametrize(
    ("name", "value", "version", "dropped"),
    [
        ("TRITON_PTXAS_PATH", TORCHS, (3, 6), True),
        ("TRITON_PTXAS_PATH", "/opt/ptxas", (3, 6), False),
        ("TRITON_PTXAS_BLACKWELL_PATH", "/usr/bin/ptxas", (3, 9), True),
        ("TRITON_PTXAS_BLACKWELL_PATH", "/opt/ptxas", (3, 9), False),
        ("TRITON_PTXAS_BLACKWELL_PATH", "/usr/bin/ptxas", (3, 8), False),  # it may need the newer one
    ],
)
def test_triton_asks_again_for_the_version_of_its_own_ptxas(monkeypatch, name, value, version, dropped):
    """Inductor names torch's ptxas where torch has one, FlashInfer the system's; Triton remembers the version of the
    first that it asked."""
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    monkeypatch.setattr("eprt.launching._TRITON", version)
    monkeypatch.setattr("shutil.which", {"ptxas": "/usr/bin/ptxas"}.get)
    monkeypatch.setenv(name, value)
    compiler.get_ptxas_version(90)
    with shared_cache():
        assert (name not in os.environ) == dropped
        assert (compiler.get_ptxas_version.cache_info().currsize == 0) == dropped
    assert os.environ[name] == value


def an_executor(form="mxfp4", **runtime):
    """Within `compiled_for`."""
    ((config, _),) = kinds_of_layers(GPT_OSS)
    config = replace(config, weight_format=form)
    shard, weights = ExpertPlacement(8, ParallelConfig(1)).shard(0), random_experts(config, 8, torch.device("cpu"))
    return TritonGroupedExecutor(config, shard, weights, META, RuntimeConfig(token_format="flat", **runtime))


def test_a_warm_up_keeps_no_memory_of_its_tokens():
    """Kernels outlive it: what they are specialized for must not hold the rows between the two matrices."""
    with compiled_for(SM90), recording() as found:
        executor = an_executor()
        before = live_tensors()
        executor.warmup(4096)
    assert any(hasattr(each, "block_shape") for kernel in found for each in kernel.arguments)
    gc.collect()
    made = [each for number, each in live_tensors().items() if number not in before]
    weights = {each.untyped_storage()._cdata for each in executor.slot_tensors().values()}
    assert [each.shape for each in made if each.untyped_storage()._cdata not in weights and each.numel() > 256**2] == []


@pytest.mark.parametrize("payload", [None, "fp8_block"])
@pytest.mark.parametrize("form", ["mxfp4", "fp8_block", "fp8_channel"])
def test_every_number_of_tokens_is_warmed_up(form, payload):
    """How the choices are sorted changes with their number within what one schedule of the GEMMs serves, and with
    whether tokens come quantized."""
    sort_by_expert_triton._prepared_place.cache_clear()  # of other tests
    with compiled_for(SM90), recording() as found:
        executor = an_executor(form, payload=payload, low_precision_activations=form != "mxfp4")
        executor.warmup(4096)
        warmed = len(found)
        for rows, came in product(range(1, 4096, 45), {None, payload}):
            executor._try_flat(rows, 2, 8, came)
        with patch.object(executor, "run") as run:
            executor._try_flat(1, 2, 8, payload)
    assert run.call_count == (4 if payload is None else 2)  # by dtype, which packed tokens have no more
    assert [(rest.kernel.fn.__name__, rest.named) for rest in found[warmed:]] == []


@pytest.mark.parametrize(
    ("form", "E", "K", "H", "I"),
    [
        ("fp8_block", 256, 8, 7168, 256),
        ("fp8_block", 256, 8, 3072, 384),
        ("fp8_channel", 16, 1, 512, 8192),
        ("mxfp4", 32, 4, 256, 4096),
        ("int4", 8, 2, 256, 14336),
        ("bf16", 128, 8, 256, 192),
    ],
)
def test_every_number_of_few_tokens_is_warmed_up(form, E, K, H, I):
    """Tiles of a few rows go by their number and by the length of sums, too."""
    config = MoEConfig(E, K, H, I, weight_format=form)
    one, shard = random_experts(config, 1, torch.device("cpu")), ExpertPlacement(E, ParallelConfig(1)).shard(0)
    runtime = RuntimeConfig(token_format="flat", low_precision_activations=form.startswith("fp8"))
    sort_by_expert_triton._prepared_place.cache_clear()  # of other tests
    with compiled_for(SM90), recording() as found:
        weights = one.map(lambda tensor: tensor.expand(E, *tensor.shape[1:]))
        executor = TritonGroupedExecutor(config, shard, weights, META, runtime)
        executor.warmup(4096)
        warmed = len(found)
        for rows in range(1, 400):
            executor._try_flat(rows, K, E)
    assert [(rest.kernel.fn.__name__, rest.named) for rest in found[warmed:]] == []


def test_what_is_recorded_is_compiled_by_a_later_call(monkeypatch):
    launched = []
    monkeypatch.setattr(CachedKernel, "_load", lambda _: launched.append)
    with compiled_for(SM90), recording() as found:
        kernel = CachedKernel(_copy_rows, META, (torch.int32,), {"K": 2}, pdl=True)
        kernel((1, 1, 1))
    assert [each.named for each in found] == [{"K": 2, "launch_pdl": True, "enable_fp_fusion": True}]
    assert kernel._run is None


def test_a_routers_warm_up_loads_what_was_only_recorded(monkeypatch):
    """A plugin starts to compile long before it warms up. What a warm-up leaves is loaded while tokens wait."""
    loaded = []
    monkeypatch.setattr(CachedKernel, "_load", lambda kernel: loaded.append(kernel._kernel.fn.__name__))
    router = FusedRouter(torch.zeros(8, 64, dtype=torch.bfloat16), Routing("softmax_topk"), 2, Rounding(*FLOATS))
    with compiled_for(SM90), recording() as found:
        router.warmup(64, logits=True)
    assert loaded == []
    router.warmup(64, logits=True)
    assert sorted(set(loaded)) == ["choice_kernel", "logits_kernel"]
    assert len(loaded) >= len(found) > 3


def test_a_kernel_that_cannot_be_compiled_is_left_to_its_first_use():
    """Others are compiled all the same, each once; what isn't marked is tried again."""
    wrong = Specialization(_copy_rows, (torch.int32,), {"K": 2})
    todo = [copy_of(torch.bfloat16), wrong, copy_of(torch.float32), copy_of(torch.float32)]
    assert compile_ahead.Compilation(todo, SM90, 2, fewest=1).wait() == 2
    assert compile_ahead.Compilation(todo, SM90, 2, fewest=1).wait() == 0
    assert compile_ahead.Compilation(todo, SM90, 2, fewest=2).wait() == 0, "no process for one kernel"


@pytest.mark.parametrize("said", ["abc", "-1", "\u00b2", "9" * 5000, "1.5"])
def test_what_is_no_number_of_processes_is_named_once(said, monkeypatch, caplog):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(100))
    monkeypatch.setenv(compile_ahead.PROCESSES, said)
    assert [compile_ahead._processes(1.0) for _ in range(3)] == [compile_ahead.MOST_PROCESSES] * 3
    (message,) = caplog.messages
    assert message.startswith("EPRT_COMPILE_PROCESSES='")
    assert len(message) < 200
    for number in ("0", "3"):
        monkeypatch.setenv(compile_ahead.PROCESSES, number)
        assert compile_ahead._processes(1.0) == int(number)


@pytest.fixture
def as_on_a_hopper_gpu(monkeypatch):
    monkeypatch.setattr(compile_ahead, "_processes", lambda _: 2)
    monkeypatch.setattr(compile_ahead, "INTERPRETED", False)
    monkeypatch.setattr(Device, "of", lambda _: SM90)


def test_what_a_warm_up_of_its_own_would_compile_alone_goes_along(as_on_a_hopper_gpu, monkeypatch):
    """Once, by the next warm-up; it is loaded before the other goes on."""
    steps = []
    monkeypatch.setattr(CachedKernel, "_load", lambda kernel: steps.append(kernel._dtypes[0]))
    monkeypatch.setattr(compile_ahead, "Compilation", lambda found, *_, **__: steps.append(len(found)) or Mock())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def make(*dtypes):
        for dtype in dtypes:
            CachedKernel(_copy_rows, META, (dtype, dtype), {"K": 2})

    def experts():
        compile_ahead.compile_ahead(lambda: make(torch.int32, torch.int64), torch.device("cuda"))
        steps.append("experts")

    with compiled_for(SM90):
        for _ in range(2):
            with compile_ahead.compiled_along(lambda: make(torch.float32)):
                experts()
        experts()
    both = [3, torch.int32, torch.int64, "experts", torch.float32]
    assert steps == [*both, *both, 2, torch.int32, torch.int64, "experts"]


def test_a_warm_up_that_began_early_is_waited_for(as_on_a_hopper_gpu, launched_nowhere, caplog):
    """What other processes are at work on isn't compiled again, and what is new is."""
    caplog.set_level("INFO", compile_ahead.logger.name)
    needed = [copy_of(torch.bfloat16, width) for width in (16, 32, 128, 256)]
    warmup = lambda: [CachedKernel(_copy_rows, META, each.arguments, each.named) for each in needed]  # noqa: E731
    with compiled_for(SM90):
        compile_ahead.start_compiling(warmup, torch.device("cuda"))
        assert launched_nowhere == []
        needed += [copy_of(torch.float32, width) for width in (16, 32, 128, 256)]
        compile_ahead.compile_ahead(warmup, torch.device("cuda"))
    assert launched_nowhere == [True] * 8
    said = [re.split(" in |,", each.message)[0] for each in caplog.records]
    assert said == [f"eprt: {what} 4 kernels" for what in ("compiling", "compiled") * 2]


def test_what_launches_a_kernel_lies_where_the_kernel_does(tmp_path, monkeypatch):
    """Triton before 3.7 builds it when the kernel is loaded. A cache of Inductor's hasn't those built ahead."""
    seen = []
    inductors = tmp_path / "triton" / "0"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(inductors))
    kernel = type("Kernel", (Mock,), {"__getitem__": lambda *_: seen.append(os.environ.get("TRITON_CACHE_DIR"))})()
    monkeypatch.setattr(Specialization, "compile", lambda _: kernel)
    monkeypatch.setattr(driver, "_active", Mock())
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", int, raising=False)
    CachedKernel(_copy_rows, torch.device("cpu"), (torch.int32,), {"K": 2})
    assert seen == [None]
    assert os.environ["TRITON_CACHE_DIR"] == str(inductors)


@pytest.mark.parametrize(("worker", "compiled"), [("raise SystemExit(3)", 0), (ONE_DIES, 2)], ids=["all", "one"])
def test_workers_that_die_leave_the_rest_to_the_others(monkeypatch, worker, compiled):
    """But for the job that one had."""
    monkeypatch.setattr(compile_ahead, "_WORKER", worker)
    todo = [copy_of(dtype) for dtype in (torch.bfloat16, torch.float32, torch.float16)]
    assert compile_ahead.Compilation(todo, SM90, 2, fewest=1).wait() == compiled


@pytest.fixture
def seen(tmp_path, monkeypatch):
    """The file that a process started by the test writes to."""
    path = tmp_path / "seen"
    monkeypatch.setenv("EPRT_TEST_SEEN", str(path))
    return path


def test_a_compiler_that_never_ends_is_given_up_and_ended(monkeypatch, seen, caplog):
    monkeypatch.setattr(compile_ahead, "_WORKER", NEVER_ANSWERS)
    monkeypatch.setattr(compile_ahead, "PATIENCE", 2.0)
    assert compile_ahead.Compilation([copy_of(torch.bfloat16)], SM90, 1, fewest=1).wait() == 0
    (warning,) = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert "1 of 1 kernels are left to be compiled at their first use" in warning
    assert "nothing was heard for 2 s" in warning
    wait_until_gone([int(process) for process in seen.read_text().split()])


def test_what_is_forked_has_one_thread_and_asked_for_no_gpu(monkeypatch, seen):
    """No lock that another thread held is copied, and no driver's state, whichever of the kernels are compiled."""
    modules = kernel_modules()
    assert len(modules) > 8
    start = compile_ahead._start
    monkeypatch.setattr(compile_ahead, "_WORKER", WHAT_IS_FORKED)
    monkeypatch.setattr(compile_ahead, "_start", lambda target, jobs, _, count: start(target, jobs, modules, count))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert compile_ahead.Compilation([copy_of(torch.bfloat16)], SM90, 1, fewest=1).wait() == 1
    assert seen.read_text().split() == ["1", "[]", "False"]


@pytest.mark.parametrize("fails", ["subprocess.Popen", "tempfile.TemporaryFile", "select.poll"])
def test_a_warm_up_goes_on_where_no_process_can_be_started(as_on_a_hopper_gpu, monkeypatch, caplog, fails):
    def refused(*_, **__):
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(f"eprt.compile_ahead.{fails}", refused)
    loaded = []
    monkeypatch.setattr(CachedKernel, "_load", lambda kernel: loaded.append(kernel._dtypes[0]))
    with compiled_for(SM90):
        dtypes = (torch.int32, torch.int64, torch.float32, torch.float16)
        warmup = lambda: [CachedKernel(_copy_rows, META, (dtype, dtype), {"K": 2}) for dtype in dtypes]  # noqa: E731
        compile_ahead.compile_ahead(warmup, torch.device("cuda"))
    assert loaded == [*dtypes]
    assert [each.levelname for each in caplog.records if each.levelno > 20] == ["WARNING"]


def test_how_many_processes(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.delenv(compile_ahead.PROCESSES, raising=False)
    assert [compile_ahead._processes(share) for share in (1, 0.5, 0.1)] == [16, 8, 1]
