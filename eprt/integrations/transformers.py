"""Expert parallelism for a transformers model in two lines:

    from eprt.integrations.transformers import parallelize
    parallelize(model, world)

Attention and everything else stay data-parallel: each rank feeds its own batch. Because the experts are shared, every
rank must make the same number of forward calls; a rank that has nothing to feed calls `idle_step` instead of one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eprt.checkpoint import DTYPE_NAMES, Checkpoint, Index, TensorInfo, load_on_all_ranks
from eprt.config import RuntimeConfig
from eprt.errors import CheckpointError, ConfigError
from eprt.layer import ExpertParallelMoE
from eprt.models import family_for, load_layer
from eprt.world import World

# Blocks whose forward also returns router scores, which only a training loss reads.
_RETURNS_SCORES = ("gpt_oss",)


def parallelize(model: nn.Module, world: World, runtime: RuntimeConfig | None = None) -> list[ExpertParallelMoE]:
    """Replace every MoE block of a transformers causal language model by one whose experts are spread over `world`.

    The block's own weights are used: whole on each rank before, this rank's share afterwards. Collective.

    Args:
        model: e.g. `GptOssForCausalLM`, of a family in `eprt.models.FAMILIES`, in bf16 or float32, on the world's
            device; equal weights on every rank.
        runtime: capacity, backends, validation.

    Returns:
        the new layers, in the model's order; `world.warmup(*layers)` prepares them.

    Raises:
        ConfigError: another family, or a model that has no MoE blocks.
        CheckpointError: a block whose tensors aren't what its config says.
    """
    source = _ModelTensors(model)
    family = family_for(source.config)
    numbers = family.moe_layers(source.config)
    if not numbers:
        raise ConfigError(f"the {source.config['model_type']} model has no MoE layers: nothing to parallelize")
    layers: list[ExpertParallelMoE] = []
    for number in numbers:
        parts = load_on_all_ranks(
            world, lambda number=number: load_layer(source, number, world.parallel, world.rank), number
        )
        layer = ExpertParallelMoE(
            parts.config,
            world,
            parts.experts,
            runtime=runtime,
            router=parts.router,
            shared=parts.shared,
            latent=parts.latent,
            layer=number,
        )
        source.forget(parts.module_path)
        model.set_submodule(parts.module_path, _Block(layer, source.config["model_type"] in _RETURNS_SCORES))
        layers.append(layer)
    return layers


def idle_step(model: nn.Module) -> None:
    """What a rank without a batch calls where the others call `model(...)`: every MoE layer once, with no tokens.

    Raises ConfigError if the model has not been through `parallelize`.
    """
    blocks = [module for module in model.modules() if isinstance(module, _Block)]
    if not blocks:
        raise ConfigError("idle_step needs a model that parallelize() has changed")
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    for block in blocks:
        layer = block.layer
        nothing = torch.empty(0, layer.config.input_size, dtype=dtype, device=layer.world.device)
        layer(nothing, token_ids=torch.empty(0, dtype=torch.int64, device=layer.world.device))


class _Block(nn.Module):
    """Stands where the model's MoE block stood, and returns what that returned."""

    def __init__(self, layer: ExpertParallelMoE, returns_scores: bool) -> None:
        super().__init__()
        self.layer = layer
        self._returns_scores = returns_scores

    def forward(self, hidden_states: torch.Tensor, input_ids: torch.Tensor | None = None) -> Any:
        """[batch, sequence, H] -> the same; `input_ids` [batch, sequence] where the model routes by token id."""
        output = self.layer(hidden_states, token_ids=input_ids)
        return (output, None) if self._returns_scores else output


class _ModelTensors(Checkpoint):
    """A model in memory, read as if it were its checkpoint: names and shapes are those of `state_dict`."""

    def __init__(self, model: nn.Module) -> None:
        config: Any = getattr(model, "config", None)
        if config is None:
            raise ConfigError(f"{type(model).__name__} has no config: expected a transformers model")
        self.directory = Path(type(model).__name__)
        self.config = json.loads(config.to_json_string(use_diff=False))
        self.bytes_read = 0
        self._handles = {}
        self._tensors: dict[str, torch.Tensor] = dict(model.state_dict())
        unreadable = [name for name, tensor in self._tensors.items() if tensor.dtype not in DTYPE_NAMES]
        for name in unreadable:
            del self._tensors[name]
        self.manifest = {
            name: TensorInfo("state_dict", tuple(tensor.shape), DTYPE_NAMES[tensor.dtype])
            for name, tensor in self._tensors.items()
        }
        # Whatever the files held, these are plain numbers now, in one dtype.
        self.config.pop("quantization_config", None)
        dtype = str(next(p.dtype for p in model.parameters() if p.is_floating_point())).removeprefix("torch.")
        for section in (self.config, self.config.get("text_config")):
            if isinstance(section, dict):
                section["dtype"] = dtype

    def read(
        self,
        name: str,
        index: Index = (),
        *,
        shape: tuple[int, ...] | None = None,
        dtypes: Any = (),
    ) -> torch.Tensor:
        """A slice of a tensor as an owned CPU copy; arguments and errors as in Checkpoint."""
        where, info = self.where(name), self.manifest[name]
        if shape is not None and info.shape != shape:
            raise CheckpointError(f"{where} has shape {info.shape}: expected {shape}")
        allowed = [DTYPE_NAMES[dtype] for dtype in dtypes]
        if allowed and info.dtype not in allowed:
            raise CheckpointError(f"{where} has dtype {info.dtype}: expected {' or '.join(allowed)}")
        view = self._tensors[name][index or (...,)]
        self.bytes_read += view.numel() * view.element_size()
        return view.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

    def forget(self, module: str) -> None:
        """Let go of a module's tensors, so that replacing the module frees them."""
        for name in [name for name in self._tensors if name.startswith(f"{module}.")]:
            del self._tensors[name]
