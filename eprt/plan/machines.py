"""Lists the makers' own figures of machines: the units of the cost model, and its assumptions.

A generation of GPU stands for one product of it, named here. Rates are peaks: what a backend reaches of them is fitted
to measured rows (`eprt.plan.model`), so a row of one machine says something of another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from eprt.config import ParallelConfig
from eprt.dispatch.spec import FABRIC_BEYOND_HOST
from eprt.support import Device


@dataclass(frozen=True)
class Machine:
    """One GPU's peak rates. GB and TFLOP are decimal.

    Attributes:
        memory_gb_per_s, bf16_tflop_per_s: peaks, without sparsity.
        link, link_gb_per_s: between GPUs of one host, each way.
    """

    name: str
    memory_gb: float
    memory_gb_per_s: float
    bf16_tflop_per_s: float
    link: Literal["NVLink", "PCIe"]
    link_gb_per_s: float


# NVIDIA's data sheets of these products. PCIe 4.0 x16 is 32 GB/s each way.
MACHINES: dict[int, Machine] = {
    70: Machine("V100 32 GB SXM", 32, 900, 125, "NVLink", 150),
    80: Machine("A100 80 GB SXM", 80, 2039, 312, "NVLink", 300),
    89: Machine("L40S", 48, 864, 362, "PCIe", 32),
    90: Machine("H200 SXM", 141, 4800, 989, "NVLink", 450),
    100: Machine("B200 (HGX)", 180, 8000, 2250, "NVLink", 900),
    103: Machine("B300 (HGX)", 288, 8000, 2250, "NVLink", 900),
}

# Assumption: a 400 Gb/s NIC for each GPU, of whose 50 GB/s transfers reach 40. DeepEP's published low-latency results
# (github.com/deepseek-ai/DeepEP, docs/legacy.md: H800, CX7 400 Gb/s) come to 39 to 46 GB/s from 64 ranks on.
RDMA_GB_PER_S = 40.0
FABRIC_RANKS = 72  # GPUs of the largest NVLink fabric over hosts, NVL72


def machine_of(device: Device) -> Machine | None:
    """Returns the product that stands for a device: of its generation, else of the one before. None for a CPU."""
    known = [sm for sm in MACHINES if sm <= device.sm]
    return MACHINES[max(known)] if device.kind == "cuda" and known else None


def linked_ranks(parallel: ParallelConfig, device: Device) -> int:
    """Counts ranks that reach each other without a network: of a host, from SM100 on of an NVLink fabric."""
    if not parallel.spans_hosts:
        return parallel.world_size
    if device.sm >= FABRIC_BEYOND_HOST:
        return min(parallel.world_size, FABRIC_RANKS)
    return parallel.ranks_per_host or parallel.world_size
