"""Replaces a model's MoE blocks by expert-parallel layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from textwrap import indent
from typing import Any

import torch
from torch import nn

from eprt.config import ParallelConfig, RuntimeConfig
from eprt.errors import ConfigError, EprtError, UnsupportedError, aligned
from eprt.graphs.recording import refusal_of
from eprt.integrations.transformers.adapters import require_none_inside, without_wrapper
from eprt.integrations.transformers.agreement import ForwardAgreement, Place, agreement_of
from eprt.integrations.transformers.dense import (
    keep_in_place,
    keep_out_of_state,
    require_loaded,
    require_plain,
    require_same_weights,
    require_unspread,
)
from eprt.integrations.transformers.load import SAME_MODEL, Placeholder, block_at, find_checkpoint, names_inside
from eprt.integrations.transformers.spread import spread
from eprt.layer import ExpertParallelMoE
from eprt.models import LayerParts, ModelFamily, build_layer, family_for, has_family, load_layer
from eprt.models.checkpoint import Checkpoint, TensorInfo, load_on_all_ranks
from eprt.models.hf_config import model_dtype
from eprt.models.shards import DTYPE_NAMES, Index, require_finite
from eprt.placement.file import PlacementFile
from eprt.plan import make_plan
from eprt.support import Device
from eprt.world import World

_ROUTED_BY = ("norm_topk_prob", "routed_scaling_factor")  # what routers take from the config under its own name


class MoEBlock(nn.Module):
    """Takes the place of a model's MoE block and returns what the model's decoder layer expects of it."""

    def __init__(self, layer: ExpertParallelMoE, returns_scores: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        self.returns_scores = returns_scores
        self.eprt_place = Place(layer.world, dtype, layer)
        keep_out_of_state(self)

    def forward(self, hidden_states: torch.Tensor, input_ids: torch.Tensor | None = None, **_: Any) -> Any:
        output = self.eprt_place(hidden_states, None, input_ids)
        return (output, None) if self.returns_scores else output

    __reduce_ex__ = Place.__reduce_ex__


def parallelize(
    model: nn.Module,
    world: World,
    runtime: RuntimeConfig | None = None,
    *,
    checkpoint: str | Path | None = None,
    placement: str | Path | PlacementFile | None = None,
    on_layer: Callable[[int, int], None] | None = None,
) -> list[ExpertParallelMoE]:
    """Replaces every MoE block of `model` by an `ExpertParallelMoE` that holds this rank's experts. Collective.

    Each block's own experts are freed before the next block is read. A rank never holds more than its share and one
    layer of what the model brought along.

    Args:
        model: a transformers model on the world's device: of a family in `eprt.models.FAMILIES`, or any with experts
            modules, of which transformers' own code then keeps router and block. Of a `PeftModel` the one inside.
        runtime: capacity, backends, validation. On several GPUs `layer_graphs` is on where the pair can be captured,
            unless it says otherwise: calls in `World.step` of up to 128 tokens per rank cost the host one launch then.
        checkpoint: the directory or hub id of the experts; only this rank's bytes are read. None takes the model's own
            tensors, or the checkpoint that `load_without_experts` loaded it from.
        placement: which experts lie where, layer by layer, as `eprt plan-experts` writes it; None: in order.
        on_layer: `on_layer(done, of)` after each block, for a progress bar.

    Returns:
        the layers, in model order. `World.warmup(*layers)` compiles and allocates before the first batch.

    Raises:
        UsageError: the model is parallelized already.
        ConfigError, UnsupportedError: the model or the checkpoint can't be used, or they aren't of one model. The error
            is the same on every rank, and nothing was changed.
        WorldMismatch: ranks hold other weights outside of the experts, or other checkpoints.
        CheckpointError: a file or tensor is wrong, the same on every rank. Load the model again: blocks before it are
            replaced.
    """
    model = without_wrapper(model)
    config = _config_of(model)
    _require_own_batches(model, world)
    placed: PlacementFile | None = None
    if placement is not None:
        placed = load_on_all_ranks(world, lambda: _checked_file(config, world.parallel, placement))
    if not has_family(config):
        layers = spread(model, world, runtime, checkpoint, placed, on_layer)
        agreement_of(model).known = True
        return layers
    with load_on_all_ranks(world, lambda: _source(model, _unpacked(config), checkpoint)) as source:
        family = family_for(config)
        numbers = family.moe_layers(config)
        require_same_weights(model, world, tuple(f"{family.module_path(number)}." for number in numbers))
        layers: list[ExpertParallelMoE] = []
        for number in numbers:
            layer = _replace_block(model, world, runtime, source, number, placed)
            layer.start_compiling(layers)
            layers.append(layer)
            if on_layer is not None:
                on_layer(len(layers), len(numbers))
    agreement = agreement_of(model)
    agreement.known = True
    _refuse_router_logits(model, agreement)
    keep_in_place(model, world.device, _dtype_of(model))
    return layers


def _replace_block(
    model: nn.Module,
    world: World,
    runtime: RuntimeConfig | None,
    source: Checkpoint,
    number: int,
    placed: PlacementFile | None,
) -> ExpertParallelMoE:
    """Puts an expert-parallel layer in the place of layer `number`'s block. Collective."""
    placement = None if placed is None else placed.placement(number, placed.num_experts, world.parallel)
    parts = load_on_all_ranks(world, lambda: load_layer(source, number, world.parallel, world.rank, placement), number)
    layer = build_layer(parts, world, with_layer_graphs(runtime, parts, Device.of(world.device)))
    family = family_for(_config_of(model))
    path = family.module_path(number)  # the files may nest the text model deeper
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, MoEBlock(layer, family.returns_scores, _dtype_of(model)))
    source.forget(f"{path}.")
    return layer


def _require_own_batches(model: nn.Module, world: World) -> None:
    """Raises ConfigError where attention is sharded over ranks with batches of their own, which it would add up, or
    where ranks have other layers."""
    size, expected = getattr(model, "tp_size", None) or 1, world.parallel.attention_tp_size
    if size not in (1, expected):
        raise ConfigError(
            f"the model's attention is sharded over {size} ranks, the World's attention_tp_size is {expected}: load it "
            "without tp_plan, each rank has its own batch then"
        )
    distributed: Any = getattr(getattr(model, "config", None), "distributed_config", None)
    if (stages := getattr(distributed, "pp_size", None) or 1) > 1:
        raise ConfigError(
            f"the model's layers are spread over {stages} ranks by pp_size: load it without, each rank runs them all"
        )


def with_layer_graphs(runtime: RuntimeConfig | None, parts: LayerParts, device: Device) -> RuntimeConfig:
    """Turns graphs of the layer's own on where `runtime` leaves them open and the layer can be captured.

    Whoever calls a transformers model eagerly waits for the host, which these graphs spare
    (benchmarks/results/step_h200_x2.json).
    """
    runtime, parallel = runtime or RuntimeConfig(), parts.placement.parallel
    by_itself = parts.router.token_table is None and parallel.world_size > 1
    if runtime.layer_graphs is not None or device.kind != "cuda" or not by_itself:
        return runtime
    try:
        plan = make_plan(parts.config, parallel, runtime, device, parts.placement)
    except EprtError:
        return runtime  # the layer will say so, on every rank
    return replace(runtime, layer_graphs=not refusal_of(plan, runtime.validate == "full"))


def _checked_file(config: dict[str, Any], parallel: ParallelConfig, given: str | Path | PlacementFile) -> PlacementFile:
    """Reads a file that has a placement for every MoE layer. Raises ConfigError."""
    found = given if isinstance(given, PlacementFile) else PlacementFile.read(given)
    if has_family(config):  # else `spread` checks each of its modules
        family = family_for(config)
        for number in family.moe_layers(config):
            found.placement(number, family.moe_config(config, number).num_experts, parallel)
    return found


def _check_model(model: nn.Module) -> None:
    require_unspread(model)
    if not any(parameter.is_floating_point() for parameter in model.parameters()):
        raise ConfigError(f"{type(model).__name__} has no floating-point parameters: expected a loaded model")
    if (dtype := _dtype_of(model)) not in (torch.bfloat16, torch.float32):
        raise ConfigError(
            f"the model computes in {_name(dtype)}, which no executor does: load it with dtype=torch.bfloat16 (or "
            "float32)"
        )
    if getattr(model.config, "output_router_logits", False):
        raise ConfigError(
            "config.output_router_logits is True: the routers are inside the expert-parallel layers, which don't hand "
            "their logits out; set it to False"
        )


def _dtype_of(model: Any) -> torch.dtype:
    """Returns the dtype of the hidden states that reach the MoE blocks: the embeddings'."""
    return model.get_input_embeddings().weight.dtype


def _refuse_router_logits(model: nn.Module, agreement: ForwardAgreement) -> None:
    """Lets each forward that is asked for router logits raise UnsupportedError, that of the model without its head
    too: transformers doesn't find routers inside the layers, and would hand out none."""
    from transformers import PreTrainedModel

    def refuse(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        asked = kwargs.get("output_router_logits")
        if getattr(module.config, "output_router_logits", False) if asked is None else asked:
            refused = (
                "output_router_logits=True: a parallelized model doesn't hand its routers' logits out; call it without"
            )
            agreement.places[0].layer.dispatcher.refuse(UnsupportedError(refused))

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.register_forward_pre_hook(refuse, with_kwargs=True)


def _source(model: nn.Module, config: dict[str, Any], checkpoint: str | Path | None) -> Checkpoint:
    """Opens what the experts come from; `config` is unpacked. Raises CheckpointError, ConfigError, UsageError."""
    family = family_for(config)
    _check_model(model)
    numbers = {family.module_path(number): number for number in family.moe_layers(config)}
    if not numbers:
        raise ConfigError(f"the {config.get('model_type')} model has no MoE layers")
    blocks = {path: block_at(model, path) for path in numbers}
    _require_loaded(model, blocks, checkpoint)
    for path, block in blocks.items():
        _require_as_configured(block, path, family.text_config(config), family.moe_config(config, numbers[path]).top_k)
    lean = [block for block in blocks.values() if isinstance(block, Placeholder)]
    held = [name for path, block in blocks.items() for name in names_inside(path, block)]
    require_none_inside(model, held, [name for block in lean for name in block.names])
    place = checkpoint if checkpoint is not None or not lean else lean[0].checkpoint
    if place is None:
        require_plain({f"{path}.{name}": p for path, block in blocks.items() for name, p in block.named_parameters()})
        return _ModelTensors(model, _dtype_of(model))
    source = Checkpoint(find_checkpoint(place))
    try:
        _require_same_model(source, config, family, _dtype_of(model))
    except ConfigError:
        source.close()
        raise
    return source


def _require_loaded(model: nn.Module, blocks: dict[str, nn.Module], checkpoint: str | Path | None) -> None:
    """Raises ConfigError if weights that are needed are on meta."""
    require_loaded(model, tuple(f"{path}." for path in blocks))
    if checkpoint is None and any(p.is_meta for block in blocks.values() for p in block.parameters()):
        raise ConfigError("the model's experts are on meta: say where they come from, parallelize(..., checkpoint=...)")


def _require_as_configured(block: nn.Module, path: str, text: dict[str, Any], top_k: int) -> None:
    """Raises ConfigError if a block, or its config, was changed after it was made: eprt takes the config's numbers,
    transformers the block's."""
    said = {"top_k": top_k} | {name: text[name] for name in _ROUTED_BY if text.get(name) is not None}
    for inner, module in block.named_modules():
        for name, expected in said.items():
            found = vars(module).get(name, expected)
            if found != expected:
                where = ".".join(filter(None, (path, inner, name)))
                raise ConfigError(
                    f"{where} is {found!r}, by the model's config it is {expected!r}: give the number to "
                    "from_pretrained (num_experts_per_tok=..., say), so that both have it"
                )


def _require_same_model(source: Checkpoint, config: dict[str, Any], family: ModelFamily, dtype: torch.dtype) -> None:
    """Raises ConfigError with what differs, side by side."""
    # A text model of a family that also has images says `_text`.
    found, expected = (str(c.get("model_type")).removesuffix("_text") for c in (source.config, config))
    if len({SAME_MODEL.get(kind, kind) for kind in (found, expected)}) > 1:
        raise ConfigError(f"{source.directory} is a checkpoint of {found}, the model is of {expected}: give its own")
    theirs = family_for(source.config)
    run = _facts(family, config)
    read = _facts(theirs, source.config)
    differing = [name for name in {**run, **read} if read.get(name, "-") != run.get(name, "-")]
    if differing:
        rows = [("", "checkpoint", "model")]
        rows += [(name, str(read.get(name, "-")), str(run.get(name, "-"))) for name in differing]
        table = indent(aligned(rows), "  ")
        raise ConfigError(f"{source.directory} is a checkpoint of another {expected} model: give its own\n{table}")
    stored = model_dtype(theirs.text_config(source.config))
    if stored != dtype:
        raise ConfigError(
            f"the model computes in {_name(dtype)}, {source.directory} is in {_name(stored)}: load the model with "
            f"dtype=torch.{_name(stored)}"
        )


def _unpacked(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config of a model whose tensors transformers may have unpacked: in which format they were doesn't
    matter."""
    return {name: value for name, value in config.items() if name != "quantization_config"}


def _facts(family: ModelFamily, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the maths of all MoE layers, by name; one value where all layers agree."""
    layers = family.moe_layers(config)
    found: dict[str, dict[int, str]] = {}
    for number in layers:
        for name, value in family.moe_config(config, number).settings().items():
            found.setdefault(name, {})[number] = value
    found.pop("weight_format", None)  # transformers may have unpacked the model's
    alike = {name: next(iter(values.values())) for name, values in found.items() if len(set(values.values())) == 1}
    return {"moe layers": layers, **found, **alike}


def _config_of(model: nn.Module) -> dict[str, Any]:
    config: Any = getattr(model, "config", None)
    if config is None:
        raise ConfigError(f"{type(model).__name__} has no config: expected a transformers model")
    return json.loads(config.to_json_string(use_diff=False))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _ModelTensors(Checkpoint):
    """A model in memory, read as if it were its own checkpoint. Names and shapes are those of `state_dict`."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.directory = Path(type(model).__name__)
        self.config = _config_of(model)
        self.bytes_read = 0
        self.touched = set()
        self._shards = {}
        tensors: dict[str, torch.Tensor] = model.state_dict()
        self._tensors = {name: tensor for name, tensor in tensors.items() if tensor.dtype in DTYPE_NAMES}
        self.manifest = {
            name: TensorInfo("state_dict", tuple(tensor.shape), DTYPE_NAMES[tensor.dtype])
            for name, tensor in self._tensors.items()
        }
        # Whatever the files held, these are plain numbers now, in one dtype.
        self.config.pop("quantization_config", None)
        for section in (self.config, self.config.get("text_config")):
            if isinstance(section, dict):
                section["dtype"] = _name(dtype)

    def forget(self, prefix: str) -> None:
        for name in [name for name in self._tensors if name.startswith(prefix)]:
            del self._tensors[name], self.manifest[name]

    def _slice(self, name: str, index: Index) -> torch.Tensor:
        view = self._tensors[name].detach()[index]
        found = view.to("cpu", copy=True, memory_format=torch.contiguous_format)
        require_finite(found, self.where(name))
        return found

    def sample(self, name: str, size: int = 64) -> bytes:
        head = self._tensors[name].detach().flatten()[:size].cpu()
        return head.view(torch.uint8).numpy().tobytes()[:size]
