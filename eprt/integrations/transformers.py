"""A transformers model with expert parallelism in two lines.

    world = World.from_env()
    layers = parallelize(model, world)             # checkpoint=directory: the experts in their own number format

Each rank keeps the whole attention (data parallel) and its share of the experts. Ranks may run batches of different
size; a rank without a batch calls `idle_step(layers)` for each forward of the others. Inside
`with world.step(tokens, number=n)`, n from the host's own count, the ranks agree once for all layers, and a rank that
does neither is caught: counting forwards here couldn't tell a skipped one from the next.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eprt.config import RuntimeConfig
from eprt.errors import CheckpointError, ConfigError
from eprt.layer import ExpertParallelMoE
from eprt.models import build_layer, family_for, load_layer
from eprt.models.checkpoint import Checkpoint, TensorInfo, load_on_all_ranks
from eprt.models.shards import DTYPE_NAMES, Index, require_finite
from eprt.world import World


class MoEBlock(nn.Module):
    """Stands where the model had its MoE block, and returns what the model's decoder layer expects of it."""

    def __init__(self, layer: ExpertParallelMoE, returns_scores: bool) -> None:
        super().__init__()
        self.layer = layer
        self.returns_scores = returns_scores

    def forward(self, hidden_states: torch.Tensor, input_ids: torch.Tensor | None = None, **_: Any) -> Any:
        output = self.layer(hidden_states, token_ids=input_ids)
        return (output, None) if self.returns_scores else output


def parallelize(
    model: nn.Module, world: World, runtime: RuntimeConfig | None = None, *, checkpoint: str | Path | None = None
) -> list[ExpertParallelMoE]:
    """Replace every MoE block of `model` by an `ExpertParallelMoE` that holds this rank's experts. Collective.

    Args:
        model: a transformers model of a family in `eprt.models.FAMILIES`, on the world's device. Its own experts are
            dropped.
        runtime: capacity, backends, validation.
        checkpoint: the directory the experts come from, in its number format; only this rank's bytes are read. None
            takes the model's own tensors, in the dtype they have (transformers may have unpacked them).

    Returns:
        the layers, in model order. `World.warmup(*layers)` compiles and allocates before the first batch.

    Raises:
        CheckpointError, ConfigError, UnsupportedError: the same on every rank; the model is then unchanged.
    """
    built: list[tuple[str, ExpertParallelMoE]] = []
    with load_on_all_ranks(world, lambda: _source(model, checkpoint)) as source:
        family = family_for(source.config)
        for number in family.moe_layers(source.config):
            parts = load_on_all_ranks(
                world, lambda number=number: load_layer(source, number, world.parallel, world.rank), number
            )
            built.append((parts.module_path, build_layer(parts, world, runtime)))
    places = [(*_parent(model, path), layer) for path, layer in built]
    for parent, name, layer in places:
        setattr(parent, name, MoEBlock(layer, family.returns_scores))
    return [layer for _, layer in built]


def _source(model: nn.Module, checkpoint: str | Path | None) -> Checkpoint:
    """Where the experts come from. Raises CheckpointError, ConfigError."""
    if checkpoint is None:
        return _ModelTensors(model)
    source = Checkpoint(checkpoint)
    # A text model of a family that also has images says `_text`.
    found, expected = (str(c.get("model_type")).removesuffix("_text") for c in (source.config, _config_of(model)))
    if found != expected:
        source.close()
        raise ConfigError(f"{checkpoint} is a checkpoint of {found}, the model is of {expected}: give its own")
    return source


def _config_of(model: nn.Module) -> dict[str, Any]:
    config: Any = getattr(model, "config", None)
    if config is None:
        raise ConfigError(f"{type(model).__name__} has no config: expected a transformers model")
    return json.loads(config.to_json_string(use_diff=False))


def idle_step(layers: Iterable[ExpertParallelMoE]) -> None:
    """One forward of a rank without tokens: it takes part in every layer's exchange and computes what others send."""
    for layer in layers:
        hash_routed = layer.config.routing.method == "hash"
        nothing = torch.empty(0, layer.config.input_size, dtype=_dtype(layer), device=layer.world.device)
        ids = torch.empty(0, dtype=torch.int64, device=layer.world.device) if hash_routed else None
        layer(nothing, token_ids=ids)


def _dtype(layer: ExpertParallelMoE) -> torch.dtype:
    """The dtype the other ranks' tokens have: the model's."""
    return torch.bfloat16 if layer.router is None else layer.router.token_dtype


def _parent(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    parent_path, _, name = path.rpartition(".")
    try:
        parent = model.get_submodule(parent_path)
        parent.get_submodule(name)
    except AttributeError as error:
        raise ConfigError(f"{type(model).__name__} has no module {path}: is the checkpoint this model's?") from error
    return parent, name


class _ModelTensors(Checkpoint):
    """A model in memory, read as if it were its checkpoint: names and shapes are those of `state_dict`."""

    def __init__(self, model: nn.Module) -> None:
        self.directory = Path(type(model).__name__)
        self.config = _config_of(model)
        self.bytes_read = 0
        self.touched = set()
        self._shards = {}
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
        self.touched.add(name)
        found = view.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        require_finite(found, where)
        return found

    def sample(self, name: str, size: int = 64) -> bytes:
        """The first bytes of a tensor."""
        head = self._tensors[name].detach().flatten()[:size].cpu()
        return head.view(torch.uint8).numpy().tobytes()[:size]
