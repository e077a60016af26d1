"""What RL frameworks add to vLLM's worker (`worker_extension_cls`): a trainer's weights come into the model."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class Trainer:
    """Mixed into vLLM's worker."""

    model_runner: Any
    vllm_config: Any

    def load_checkpoint(self, way: str, checkpoint: str) -> None:
        """Loads one as vLLM's weight transfer does what it received ("layerwise"), or the experts, weight by weight,
        through the model's own `load_weights` ("direct")."""
        from safetensors.torch import load_file
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model, weights = self.model_runner.get_model(), load_file(f"{checkpoint}/model.safetensors")
        # vLLM's own linear layers are packed on CPU: theirs come by the layerwise reload.
        single = [name for name in sorted(weights) if way == "direct" and ".experts." in name]
        names = [name for name in sorted(weights) if name not in single]
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            for start in range(0, len(names), 40):
                model.load_weights([(name, weights[name]) for name in names[start : start + 40]])
            finalize_layerwise_reload(model, self.vllm_config.model_config)
        for name in single:
            model.load_weights([(name, weights[name])])

    def die_in(self, what: str) -> None:
        """Ends the worker of EP rank 1 in the middle of its next "update" of weights or "move" of experts, when one
        layer is done and others aren't."""
        from vllm.distributed import get_ep_group

        from eprt.integrations.engine import balancing, bound

        if get_ep_group().rank_in_group != 1:
            return
        owner, name = (bound.BoundLayer, "_replace") if what == "update" else (balancing, "rebalance")
        inner, calls = getattr(owner, name), []

        def dies(*args: Any) -> Any:
            calls.append(args)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return inner(*args)

        setattr(owner, name, dies)


def gathered(communicator: Any, tensors: list[torch.Tensor], dim: int, sizes: list[int]) -> list[torch.Tensor]:
    """What a GPU's communicator gathers of ranks with unequal numbers of rows; vLLM's CPU build lacks it."""
    found = []
    for tensor in tensors:
        padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=communicator.device_group)
        found.append(torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]))
    return found


def scattered(communicator: Any, tensor: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
    """This rank's rows of the ranks' sum, as a GPU's communicator has them."""
    total = tensor.clone()
    torch.distributed.all_reduce(total, group=communicator.device_group)
    return total.split(sizes)[communicator.rank_in_group]


CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = gathered, scattered
