"""Experts of models for which eprt has no reader: transformers' own code keeps router and block, eprt runs the experts.

Their weights are read through the renamings and conversions that transformers itself applies to the checkpoint, own
experts' tensors only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from eprt.config import Activation, MoEConfig, ParallelConfig, RuntimeConfig
from eprt.errors import CheckpointError, ConfigError, UnsupportedError
from eprt.integrations.transformers.adapters import require_none_inside
from eprt.integrations.transformers.agreement import NUMBER, Place, layer_numbers
from eprt.integrations.transformers.dense import (
    keep_in_place,
    keep_out_of_state,
    require_loaded,
    require_plain,
    require_same_weights,
    require_unspread,
)
from eprt.integrations.transformers.experts import (
    activation_of,
    canonical,
    config_of,
    find_experts,
    parameter_names,
    top_k_of,
)
from eprt.integrations.transformers.load import find_checkpoint
from eprt.integrations.transformers.own_code import use_own_code
from eprt.json_files import shown
from eprt.layer import ExpertParallelMoE
from eprt.models.checkpoint import Checkpoint, hash63, load_on_all_ranks
from eprt.models.shards import require_finite
from eprt.placement import ExpertPlacement, ExpertShard
from eprt.placement.file import PlacementFile
from eprt.tokens import TopK
from eprt.weights import Dense, ExpertWeights
from eprt.world import World
from eprt.world.agree import Header, shared_errors

_EXPERT = re.compile(r"(?<=experts[._])\d+(?=\.)|(?<=expert_)\d+(?=\.)")
_PLAIN = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class _Parts:
    """Holds what a rank needs for one experts module: the layer's maths, where all experts lie, and its own ones.

    `own_code`: the same as the module lays them out, where its own code runs them.
    """

    config: MoEConfig
    placement: ExpertPlacement
    weights: ExpertWeights
    own_code: dict[str, torch.Tensor] | None

    @property
    def fingerprint(self) -> int:
        """A hash of what all ranks share; each holds other weights."""
        return hash63(repr(self.config).encode(), self.placement.fingerprint().encode())


def spread(
    model: nn.Module,
    world: World,
    runtime: RuntimeConfig | None,
    checkpoint: str | Path | None,
    placed: PlacementFile | None,
    on_layer: Callable[[int, int], None] | None = None,
) -> list[ExpertParallelMoE]:
    """Gives every experts module of `model` an `ExpertParallelMoE` with this rank's experts. Collective.

    Args:
        checkpoint: the directory or hub id of the experts; None: the one that `load_without_experts` loaded the model
            from, or the model's own tensors.
        on_layer: see `parallelize`.

    Raises:
        ConfigError, UnsupportedError, CheckpointError, WorldMismatch: on every rank.
    """
    layers: list[ExpertParallelMoE] = []
    with closing(load_on_all_ranks(world, lambda: open_source(model, checkpoint))) as source:
        require_same_weights(model, world, tuple(f"{path}." for path in source.modules))
        with shared_errors(world, Header("load", -1, 0)):  # before any module is changed
            placements = {path: source.placement(path, world.parallel, placed) for path in source.modules}
        for path, experts in source.modules.items():
            number = source.numbers[path]
            parts = load_on_all_ranks(world, partial(source.parts, path, world.rank, placements[path]), number)
            layer = ExpertParallelMoE(
                parts.config, world, parts.weights, runtime=runtime, layer=number, placement=parts.placement
            )
            _install(experts, layer, source.dtype)
            if parts.own_code is not None:
                use_own_code(layer, experts, parts.own_code)
            layer.start_compiling(layers)
            layers.append(layer)
            if on_layer is not None:
                on_layer(len(layers), len(source.modules))
        for experts in source.modules.values():
            keep_out_of_state(experts)
        keep_in_place(model, world.device, source.dtype)
        _complete_calls(model, source.modules)
    return layers


def _complete_calls(model: nn.Module, modules: dict[str, Any]) -> None:
    """Lets a block with several experts modules make a call without tokens for each that its forward left out.

    ERNIE 4.5 VL has experts for text and others for images; whether a rank's batch has any, others don't know.
    """
    blocks: dict[str, list[Any]] = {}
    for path, experts in modules.items():
        last = list(NUMBER.finditer(path))[-1]
        blocks.setdefault(path[: last.end()], []).append(experts)
    for path, several in blocks.items():
        if len(several) > 1:
            _count_calls(model.get_submodule(path), several)


def _count_calls(block: nn.Module, several: list[Any]) -> None:
    called: list[Any] = []

    def begin(*_: Any) -> None:
        called.clear()  # what a forward that broke off has left

    def note(module: nn.Module, *_: Any) -> None:
        called.append(module)

    for experts in several:
        experts.register_forward_hook(note)

    def complete(*_: Any) -> None:
        for experts in several:
            if experts not in called:
                experts.__dict__["eprt_place"].idle()

    block.register_forward_pre_hook(begin)
    block.register_forward_hook(complete)


def _install(experts: Any, layer: ExpertParallelMoE, dtype: torch.dtype) -> None:
    """Lets the layer make the module's calls."""
    experts.__dict__["eprt_place"] = place = Place(layer.world, dtype, layer)
    identities, E = bool(getattr(experts, "zero_expert_num", 0)), layer.config.num_experts

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        x, ids = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous(), top_k_index.to(torch.int32)
        weights = top_k_weights.float()
        output = place(x, TopK(ids.clamp(max=E).contiguous(), weights.contiguous()))
        if identities:  # LongCat-Flash: ids from E on return the token itself
            output = output + x * torch.where(ids >= E, weights, 0.0).sum(dim=1, keepdim=True).to(x.dtype)
        return output.view_as(hidden_states)

    experts.__dict__["forward"] = forward
    for name in parameter_names(experts):
        experts._parameters[name] = None


def open_source(model: nn.Module, checkpoint: str | Path | None) -> _Source:
    """Opens what the experts come from. Raises ConfigError, CheckpointError, UsageError."""
    left_out = (m.__dict__.get("eprt_left_out") for m in find_experts(model).values())
    place = checkpoint or next((directory for directory, _ in filter(None, left_out)), None)
    if place is not None:
        return CheckpointSource(model, place)
    source = _Source(model)
    require_plain({f"{path}.{n}": p for path, m in source.modules.items() for n, p in source.parameters(m).items()})
    return source


class _Source:
    """A model in memory as the place where its own experts come from."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.modules: dict[str, Any] = find_experts(model)
        if not self.modules:
            raise ConfigError(
                f"{type(model).__name__} has no experts that eprt finds: neither a family of eprt.models.FAMILIES nor "
                "experts modules of transformers"
            )
        self.numbers = layer_numbers(self.modules)
        require_unspread(model)
        try:
            self.dtype: torch.dtype = model.get_input_embeddings().weight.dtype
        except NotImplementedError as error:
            inner = sorted({path.partition(".")[0] for path in self.modules})
            raise ConfigError(
                f"{type(model).__name__} joins models that run apart ({', '.join(inner)}): parallelize and call one of "
                f"them, parallelize(model.{inner[-1]}, world)"
            ) from error
        if self.dtype not in _PLAIN:
            raise ConfigError(f"the model computes in {self.dtype}: load it with dtype=torch.bfloat16 (or float32)")
        require_loaded(model, tuple(f"{path}." for path in self.modules))
        left_out = {path: m for path, m in self.modules.items() if "eprt_left_out" in m.__dict__}
        names = (f"{path}.{name}" for path, m in left_out.items() for name in self.parameters(m))
        require_none_inside(model, self.modules, names)

    def close(self) -> None:
        """Closes what the experts were read from."""

    @property
    def fingerprint(self) -> int:
        return hash63(repr(sorted(self.modules)).encode())

    def placement(self, path: str, parallel: ParallelConfig, placed: PlacementFile | None) -> ExpertPlacement:
        """Returns where a module's experts lie: in order without a file. Raises ConfigError."""
        E = self.parameters(self.modules[path])["down_proj"].shape[0]
        return ExpertPlacement(E, parallel) if placed is None else placed.placement(self.numbers[path], E, parallel)

    def parts(self, path: str, rank: int, placement: ExpertPlacement) -> _Parts:
        """Reads a rank's part of one module. Raises ConfigError, UnsupportedError, CheckpointError."""
        experts, E = self.modules[path], placement.num_experts
        whole, shard = self.parameters(experts), placement.shard(rank)
        own = self.own_tensors(path, whole, shard)
        gate_up, down, *biases = canonical(experts, [own[name] for name in parameter_names(experts)])
        parent = self.model.get_submodule(path.rpartition(".")[0])
        activation = activation_of(experts)
        if activation is None and shard.moe_tp_size > 1:
            raise UnsupportedError(f"{type(experts).__name__} runs by its own code, which can't split an expert")
        config = config_of(experts, down, E, top_k_of(experts, parent), activation or Activation())
        weights = _cut(gate_up, down, biases, config, shard)
        return _Parts(config, placement, weights, own if activation is None else None)

    def parameters(self, experts: Any) -> dict[str, Any]:
        """Returns the parameters that all experts of a module have."""
        _, found = experts.__dict__.get("eprt_left_out", (None, experts._parameters))
        return {name: found[name] for name in parameter_names(experts)}

    def own_tensors(self, path: str, whole: dict[str, Any], shard: ExpertShard) -> dict[str, torch.Tensor]:
        """Returns own experts as the module lays them out. Raises ConfigError, CheckpointError, UnsupportedError."""
        if any(tensor.is_meta for tensor in whole.values()):
            raise ConfigError(
                "the model's experts are on meta: say where they come from, parallelize(..., checkpoint=...)"
            )
        held = torch.tensor(list(shard.experts), device="cpu")
        own = {name: tensor.detach()[held.to(tensor.device)].cpu() for name, tensor in whole.items()}
        for name, tensor in own.items():
            require_finite(tensor, f"{path}.{name} of experts {shown(shard.experts)}")
        return own


class CheckpointSource(_Source):
    """A checkpoint, whose tensors transformers renames and converts."""

    def __init__(self, model: Any, place: str | Path) -> None:
        super().__init__(model)
        self.checkpoint = Checkpoint(find_checkpoint(place))
        found, expected = _model_types(self.checkpoint.config), _model_types(model.config.to_dict())
        if not found & expected:
            self.close()
            said = f"is a checkpoint of {shown(found)}, the model is of {shown(expected)}: give its own"
            raise ConfigError(f"{self.checkpoint.directory} {said}")
        self._mapping: list[Any] = []
        self._keys = self._keys_of()

    def close(self) -> None:
        self.checkpoint.close()

    @property
    def fingerprint(self) -> int:
        return self.checkpoint.fingerprint

    def own_tensors(self, path: str, whole: dict[str, Any], shard: ExpertShard) -> dict[str, torch.Tensor]:
        """Reads own experts' tensors, and lets transformers convert them. Raises CheckpointError, UnsupportedError."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        experts, E = self.modules[path], whole["down_proj"].shape[0]
        if not self._keys[path]:
            where = self.checkpoint.directory
            raise CheckpointError(f"{where}: the experts of {path} can't be read: no tensor of theirs")
        # LongCat-Flash counts experts without weights (they return the token itself) among those of the first matrix.
        total = E + (getattr(experts, "zero_expert_num", 0) or 0)
        for key in self._keys[path]:  # all before the first is read: scales of packed experts have any shape
            self.checkpoint.require(key, dtypes=_PLAIN)
        tensors = {name: tensor for key in self._keys[path] for name, tensor in self._own(key, E, total, shard)}
        together = [m for p, m in self.modules.items() if set(self._keys[p]) & set(self._keys[path])]
        with ExitStack() as restoring, _no_progress_bar():
            for module in together:
                empty = _on_meta(self.parameters(module), shard.num_local_experts)
                restoring.enter_context(patch.dict(module._parameters, empty))
            found, _ = convert_and_load_state_dict_in_model(
                self.model, tensors, LoadStateDictConfig(weight_mapping=self._mapping, device_map={"": "cpu"})
            )
            loaded = {name: experts._parameters[name].detach() for name in whole}
        wrong = [f"{name}: {' '.join(text.splitlines()[-2:])}" for name, text in found.conversion_errors.items()]
        for name, shape, expected in sorted(found.mismatched_keys):
            wrong.append(f"{name} of this rank's experts has shape {tuple(shape)}: expected {tuple(expected)}")
        wrong = wrong or [f"no tensor of {name}" for name, tensor in loaded.items() if tensor.is_meta]
        if wrong:
            said = "; ".join(wrong)
            raise CheckpointError(f"{self.checkpoint.directory}: the experts of {path} can't be read: {said}")
        return loaded

    def _keys_of(self) -> dict[str, list[str]]:
        """Returns the names of each module's tensors in the checkpoint."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        self._mapping = get_model_conversion_mapping(self.model)
        names: dict[str, Any] = dict(self.model.state_dict())
        names |= {f"{path}.{n}": p for path, m in self.modules.items() for n, p in self.parameters(m).items()}
        renamings = [each for each in self._mapping if isinstance(each, WeightRenaming)]
        converters = [each for each in self._mapping if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        found: dict[str, list[str]] = {path: [] for path in self.modules}
        for key in self.checkpoint.manifest:
            name, pattern = rename_source_key(key, renamings, converters, self.model.base_model_prefix, names)
            if pattern is None and name not in names:
                name, _ = rename_source_key(key, [], [], self.model.base_model_prefix, names)
            targets = [] if pattern is None else by_pattern[pattern].target_patterns
            for path in {n.rpartition(".")[0] for n in (name, *(name.replace(targets[0], t) for t in targets))}:
                if path in found:
                    found[path].append(key)
        return found

    def _own(self, key: str, E: int, total: int, shard: ExpertShard) -> Iterator[tuple[str, torch.Tensor]]:
        """Reads what a tensor of the checkpoint holds of own experts, by the names of one that holds them alone."""
        source, L = self.checkpoint, shard.num_local_experts
        info = source.manifest[key]
        if numbered := _EXPERT.search(key):
            # ERNIE 4.5 VL numbers the images' experts after the texts'.
            group, expert = divmod(int(numbered.group()), total)
            for slot in (slot for slot, held in enumerate(shard.experts) if held == expert):
                yield f"{key[: numbered.start()]}{group * L + slot}{key[numbered.end() :]}", source.read(key)
        elif info.shape[:1] in ((E,), (total,)):
            yield key, torch.stack([source.read(key, (expert,)) for expert in shard.experts])
        else:
            raise UnsupportedError(f"{source.where(key)} has shape {info.shape}: expected one of {E} experts, or all")


def _model_types(config: dict[str, Any]) -> set[str]:
    """Returns the `model_type`s of a config and of its sections: a text model may be all that is loaded."""
    own = {str(config["model_type"])} if config.get("model_type") else set()
    return own.union(*(_model_types(section) for section in config.values() if isinstance(section, dict)))


def _cut(
    gate_up: torch.Tensor, down: torch.Tensor, biases: list[torch.Tensor], config: MoEConfig, shard: ExpertShard
) -> ExpertWeights:
    """Returns canonical weights, of each expert this MoE-TP rank's slice."""
    if shard.moe_tp_size > 1:
        part = shard.slice_intermediate(config.intermediate_size)
        sides = config.activation.parts
        gate_up = torch.cat([side[:, part] for side in gate_up.chunk(sides, dim=1)], dim=1)
        down = down[:, :, part].contiguous()
        if biases:
            biases = [torch.cat([side[:, part] for side in biases[0].chunk(sides, dim=1)], dim=1), biases[1]]
    return ExpertWeights(Dense(gate_up), Dense(down), *biases)


def _on_meta(whole: dict[str, Any], num_experts: int) -> dict[str, nn.Parameter]:
    """Returns parameters for `num_experts` of a module's experts, to be loaded."""
    shapes = {name: (num_experts, *tensor.shape[1:]) for name, tensor in whole.items()}
    empty = {name: torch.empty(shape, dtype=whole[name].dtype, device="meta") for name, shape in shapes.items()}
    return {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in empty.items()}


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
