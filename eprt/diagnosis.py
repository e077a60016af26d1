"""Collects facts about this machine, and what stands in the way of each backend. Builds and downloads nothing."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eprt.dispatch import DISPATCHERS, DispatcherSpec
from eprt.experts import EXECUTORS, ExecutorSpec
from eprt.support import Device
from eprt.support import installed_version as _version

DISTRIBUTIONS = (
    *("eprt", "triton", "safetensors", "transformers"),
    *("flashinfer-python", "flashinfer-jit-cache", "flashinfer-cubin", "humming-kernels", "nvidia-cutlass-dsl"),
    *("tokenspeed-deepep", "deep-ep", "nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)

NVSHMEM_LIBRARY = "libnvshmem_host.so.3"
_MIN_SHM_GB = 1.0
_MIN_OPEN_FILES = 4096


@dataclass(frozen=True)
class Problem:
    """Something that will not work, or not well, and what to do about it."""

    what: str
    remedy: str


def versions() -> dict[str, str]:
    """Returns software versions; "-" for what isn't installed."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda or "- (CPU build)",
        "NCCL of torch": _nccl_of_torch() or "-",
        **{name: _version(name) or "-" for name in DISTRIBUTIONS},
    }


def devices() -> list[str]:
    """Returns one line per GPU, or one for the CPU."""
    if not torch.cuda.is_available():
        return [f"cpu: {os.cpu_count()} cores, {torch.get_num_threads()} torch threads"]
    return [
        f"cuda:{index}: {facts.name}, sm{10 * facts.major + facts.minor}, {facts.total_memory / 2**30:.0f} GiB, "
        f"{facts.multi_processor_count} SMs"
        for index in range(torch.cuda.device_count())
        for facts in [torch.cuda.get_device_properties(index)]
    ]


def host() -> dict[str, str]:
    """Returns limits of this host that multi-process runs meet."""
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    return {
        "/dev/shm": "-" if shm is None else f"{shm.total / 2**30:.1f} GiB, {shm.free / 2**30:.1f} free",
        "open files": _limit(resource.RLIMIT_NOFILE),
        "locked memory": _limit(resource.RLIMIT_MEMLOCK),
        "processes": _limit(resource.RLIMIT_NPROC),
        "compiler": shutil.which("nvcc") or "no nvcc on PATH",
        "driver": command_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
        or "-",
    }


def links() -> str:
    """Returns nvidia-smi's matrix of links between GPUs, or "" where there is none to show."""
    return command_output("nvidia-smi", "topo", "-m") if torch.cuda.device_count() > 1 else ""


def backends() -> list[dict[str, object]]:
    """Returns kind, name, ok and reason of every dispatcher and executor: whether it can run on this machine with the
    packages installed here, and what is missing, or what it is."""
    device = Device.here("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, object]] = []
    for kind, table in (("dispatcher", DISPATCHERS), ("executor", EXECUTORS)):
        for spec in table.values():
            missing = _missing(spec, device)
            rows.append({"kind": kind, "name": spec.name, "ok": not missing, "reason": missing or spec.summary})
    return rows


def first_use() -> list[dict[str, Any]]:
    """Returns the kernels that are compiled when they are first used, and whether a result is already on disk here.

    Times were taken on an H200 host with 64 cores (fused_moe_90, mnnvl_moe_alltoall) and on one H200 (humming).
    """
    home = os.path.expanduser("~")  # unlike Path.home, no error where the system doesn't know the user
    flashinfer = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", home)) / ".cache" / "flashinfer"
    ahead = [_folder("flashinfer_jit_cache"), _folder("flashinfer")]

    def built(name: str) -> bool:
        places = [(flashinfer, f"**/{name}*/*.so")]
        places += [(folder, f"{sub}/{name}*/*.so") for folder in ahead if folder for sub in ("data/aot", "jit_cache")]
        return any(next(place.glob(pattern), None) is not None for place, pattern in places)

    humming = Path(os.environ.get("HUMMING_CACHE_DIR", f"{home}/.humming"))
    rows = [
        ("FlashInfer fused_moe_90", "executor cutlass_mxfp4", "more than 20 min", built("fused_moe_90")),
        ("FlashInfer mnnvl_moe_alltoall", "dispatcher flashinfer", "3.5 min", built("mnnvl_moe_alltoall")),
        ("humming", "executor humming", "about 20 s a pair of shapes", any(humming.glob("**/kernel.cubin"))),
    ]
    return [dict(zip(("kernels", "needed_by", "takes", "cached"), row, strict=True)) for row in rows]


def problems() -> list[Problem]:
    """Returns everything found here that would stop or slow a backend."""
    return [*_torch_problems(), *_deepep_problems(), *_flashinfer_problems(), *_link_problems(), *_host_problems()]


# ---- one subject each -----------------------------------------------------------------------------------------


def _torch_problems() -> Iterator[Problem]:
    if shutil.which("nvidia-smi") and torch.version.cuda is None:
        yield Problem(
            "an NVIDIA driver is here, but torch is a CPU build", "pip uninstall torch; pip install 'torch>=2.10'"
        )
    if torch.version.cuda is None or not torch.cuda.is_available():
        return
    major = torch.version.cuda.split(".")[0]
    wheel = _version(f"nvidia-nccl-cu{major}")
    loaded = _nccl_of_torch()
    if wheel and wheel != loaded:
        yield Problem(
            f"torch uses NCCL {loaded}, the wheel nvidia-nccl-cu{major} is {wheel}: another libnccl is found first",
            "take it off LD_LIBRARY_PATH, or reinstall torch and the wheel together",
        )
    other = "12" if major == "13" else "13"
    for name in ("nvidia-nccl", "nvidia-nvshmem"):
        if _version(f"{name}-cu{other}"):
            yield Problem(
                f"{name}-cu{other} is installed beside a CUDA {major} torch; both put their library into one folder",
                f"pip uninstall {name}-cu{other}",
            )


def _deepep_problems() -> Iterator[Problem]:
    requirement = DISPATCHERS["deepep"].requirement
    wheel = requirement.wanted if requirement else "deep_ep"
    if (placeholder := _version("deep-ep")) and placeholder.startswith("1.0.0"):
        yield Problem(
            f"the distribution deep-ep {placeholder} is a placeholder without the module's kernels",
            f"pip uninstall deep-ep; pip install '{wheel}'",
        )
    if importlib.util.find_spec("deep_ep") is None:
        return
    if not _has_nvshmem():
        yield Problem(
            f"deep_ep is installed, but {NVSHMEM_LIBRARY} can't be loaded",
            "pip install nvidia-nvshmem-cu13 (cu12 for a CUDA 12 torch), and put its lib folder on LD_LIBRARY_PATH",
        )
    error = _import_error("deep_ep")
    if "undefined symbol" in error:
        yield Problem(
            f"deep_ep was built against another torch: {error}", f"install the build for torch {torch.__version__}"
        )
    elif error:
        yield Problem(f"deep_ep can't be imported: {error}", "see the message; NVSHMEM, torch and Python must match")


def _flashinfer_problems() -> Iterator[Problem]:
    own, cache = _version("flashinfer-python"), _version("flashinfer-jit-cache")
    if own and cache and own != cache.split("+")[0]:
        yield Problem(
            f"flashinfer-jit-cache {cache} is for another release than flashinfer-python {own}",
            f"pip install flashinfer-jit-cache=={own} --index-url https://flashinfer.ai/whl/{cache.partition('+')[2]}",
        )
    if torch.cuda.is_available() and shutil.which("nvcc") is None:
        for item in first_use():
            if not item["cached"] and "FlashInfer" in item["kernels"]:
                yield Problem(
                    f"{item['kernels']} is not built, and there is no nvcc to build it", "install CUDA's nvcc"
                )


def _link_problems() -> Iterator[Problem]:
    for line in links().splitlines():
        cells = line.split()
        if not cells or not cells[0].startswith("GPU") or len(cells) < 3 or cells[1].startswith("GPU"):
            continue
        slow = sorted({cell for cell in cells[1 : 1 + torch.cuda.device_count()] if cell != "X" and cell[:2] != "NV"})
        if slow:
            yield Problem(
                f"{cells[0]} reaches other GPUs by {', '.join(slow)}, not by NVLink",
                "dispatchers symm, flashinfer and deepep need NVLink between all GPUs; use torch or none",
            )


def _host_problems() -> Iterator[Problem]:
    if Path("/dev/shm").is_dir() and (size := shutil.disk_usage("/dev/shm").total / 2**30) < _MIN_SHM_GB:
        yield Problem(f"/dev/shm holds {size:.2f} GiB", f"give the container --shm-size={_MIN_SHM_GB:.0f}g or more")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 < soft < _MIN_OPEN_FILES and torch.cuda.device_count() > 1:
        yield Problem(f"at most {soft} open files", f"ulimit -n {_MIN_OPEN_FILES}")


# ---- helpers --------------------------------------------------------------------------------------------------


def _missing(spec: DispatcherSpec | ExecutorSpec, device: Device) -> str:
    """Returns everything that is missing, not only the first thing."""
    missing: list[str] = []
    low, high = spec.sm if isinstance(spec, ExecutorSpec) else (0, 999)
    if device.kind not in spec.devices:
        missing.append(f"runs on {', '.join(spec.devices)}, this machine is {device}")
    elif device.kind == "cuda" and not low <= device.sm <= high:
        missing.append(f"needs sm{low}" + (f" to sm{high}" if high < 999 else " or later") + f", this is {device}")
    if spec.requirement is not None and not (found := spec.requirement.check()):
        missing.append(found.reason)
    return "; ".join(missing)


def _nccl_of_torch() -> str:
    """Returns the NCCL that torch has loaded; "" without CUDA."""
    if not torch.cuda.is_available():
        return ""
    from torch.cuda import nccl

    return ".".join(map(str, nccl.version()))


def _folder(module: str) -> Path | None:
    spec = importlib.util.find_spec(module)
    return Path(spec.origin).parent if spec and spec.origin else None


def _has_nvshmem() -> bool:
    try:
        ctypes.CDLL(NVSHMEM_LIBRARY)
    except OSError:
        return False
    return True


def _import_error(module: str) -> str:
    """Returns the last line of what `import module` prints when it fails, in a process of its own; "" if it works."""
    words = [sys.executable, "-c", f"import torch, {module}"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired as late:
        return f"not in {late.timeout:.0f} s"
    lines = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else (lines[-1] if lines else f"exit code {done.returncode}")


def _limit(kind: int) -> str:
    soft, _ = resource.getrlimit(kind)
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)


def command_output(*words: str) -> str:
    """Returns the standard output of a command; "" if it isn't there or fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
