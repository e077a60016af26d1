"""What no kernel can beat by the makers' figures: bytes over the busiest link, then the experts' work."""

from __future__ import annotations

from eprt.config import MoEConfig, ParallelConfig
from eprt.plan.machines import RDMA_GB_PER_S, linked_ranks, machine_of
from eprt.plan.model import WEIGHT_BYTES, ranks_of_a_token
from eprt.support import Device


def floor_us(config: MoEConfig, parallel: ParallelConfig, tokens: int, device: Device) -> float | None:
    """Microseconds of a layer's call: each token in bf16 once to each rank that needs it and its sum back, over the
    busier of link and network; then the larger of reading the weights of the experts hit and the arithmetic. None for a
    CPU."""
    machine = machine_of(device)
    if machine is None:
        return None
    W, linked = parallel.world_size, linked_ranks(parallel, device)
    E, K = config.num_experts, config.top_k
    moved = tokens * ranks_of_a_token(config, parallel) * 4 * config.hidden_size / W
    carried = max(moved * (linked - 1) / machine.link_gb_per_s, moved * (W - linked) / RDMA_GB_PER_S) / 1e3
    values = (config.activation.parts + 1) * config.intermediate_size / parallel.moe_tp_size * config.hidden_size
    local = E / parallel.ep_size
    hit = local * (1 - (1 - K / E) ** (tokens * W))
    read = hit * values * WEIGHT_BYTES[config.weight_format] / machine.memory_gb_per_s / 1e3
    multiplied = 2 * tokens * W * K * local / E * values / machine.bf16_tflop_per_s / 1e6
    return carried + max(read, multiplied)
