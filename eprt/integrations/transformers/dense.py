"""The part of a parallelized model that every rank keeps whole: its comparison between ranks, and what may not be done
to it any more, since the experts, or the other ranks, wouldn't follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any, NoReturn

import torch
from torch import nn

from eprt.errors import ConfigError, UsageError, WorldMismatch
from eprt.world import World
from eprt.world.agree import Header, exchange, fingerprint_of
from eprt.world.wire import gather_values

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HEAD = 16  # numbers whose order counts, too
_NOT_SAVED = (
    "state_dict or save_pretrained of a parallelized model would leave out experts, which are on other ranks and no "
    "parameters: save it before parallelize, or copy the checkpoint that it came from (PEFT takes a state_dict, too: "
    "load and add adapters before parallelize)"
)
_NOT_LOADED = (
    "load_state_dict into a parallelized model would leave its experts as they are: load it before parallelize"
)


def sharded_by_fsdp(model: nn.Module) -> nn.Module | None:
    """Returns the model of whose dense weights FSDP gathers any in a forward, also where `model` is PEFT's or a
    compiler's wrapper of it; None: FSDP shards none."""
    from torch.distributed.fsdp import FSDPModule
    from transformers import PreTrainedModel

    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return None
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)


def refuse_capture(world: World) -> None:
    """Raises UsageError where another library captures a forward: its replays would meet no other rank."""
    if world.size > 1 and world.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UsageError(
            "a CUDA graph of another library captures a forward, in whose replays ranks can't meet: turn it off "
            "(ContinuousBatchingConfig(use_cuda_graph=False), say); generate(graphs=True) replays graphs of eprt"
        )


def require_loaded(model: nn.Module, outside: tuple[str, ...]) -> None:
    """Raises ConfigError if weights outside of `outside` (prefixes of names) are on meta, or hold NaN. Infinity may be
    meant: an attention sink that takes nothing."""
    weights = {name: p.detach() for name, p in model.named_parameters() if not name.startswith(outside)}
    found = [name for name, weight in weights.items() if weight.is_meta]
    if found:
        raise ConfigError(
            f"{len(found)} of the model's weights are on meta ({found[0]}, ...): load it onto one device (what "
            "device_map offloads is on meta), with load_without_experts if its experts don't fit"
        )
    bad = [name for name, w in weights.items() if _has_extremes(w) and torch.aminmax(w).min.isnan()]
    if bad:
        raise ConfigError(
            f"{len(bad)} of the model's weights hold NaN ({bad[0]}: {int(weights[bad[0]].isnan().sum())} of "
            f"{weights[bad[0]].numel()} numbers): expected none; load whole files"
        )


def _has_extremes(weight: torch.Tensor) -> bool:
    """Tells whether `aminmax` knows a tensor's numbers: not those of FP8, of other ranks, packed, or of none."""
    plain = weight.is_floating_point() and weight.element_size() > 1 and not hasattr(weight, "__tensor_flatten__")
    return plain and weight.numel() > 0


def require_unspread(model: nn.Module) -> None:
    """Raises UsageError if experts of the model are spread over a World already."""
    if any("eprt_place" in module.__dict__ for module in model.modules()):
        raise UsageError("the model is parallelized already: load it once more to spread it over another world")


def require_plain(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises ConfigError if tensors that a rank takes its experts from are spread over ranks already (DTensors), or
    hold packed numbers, whose scales lie elsewhere."""
    for name, tensor in tensors.items():
        if hasattr(tensor, "to_local"):
            raise ConfigError(
                f"{name} is sharded over ranks already: call parallelize before fully_shard, or load the model by "
                "load_without_experts"
            )
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.element_size() == 1:
            raise ConfigError(
                f"{name} is packed ({type(tensor).__name__} of {tensor.dtype}): load the model by "
                "load_without_experts, which reads the checkpoint's own format, or unpacked (dequantize=True, say)"
            )


def require_same_weights(model: nn.Module, world: World, outside: tuple[str, ...]) -> None:
    """Compares a hash of every weight outside of `outside` (prefixes of names) between ranks. Collective.

    Weights that are sharded over ranks are left out. Raises WorldMismatch, which names the first that differs.
    """
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if not name.startswith(outside) and not hasattr(parameter, "to_local") and not parameter.is_meta:
            found |= _parts(name, parameter.detach())
    hashes = _hashes(found)
    try:
        exchange(world, Header("load", -1, 0, fingerprint=fingerprint_of(hashes)))
    except WorldMismatch as mismatch:
        by_rank = gather_values(world, hashes)
        names = sorted({name for rank in by_rank for name in rank or {}})
        differing = [name for name in names if len({rank.get(name) for rank in by_rank if rank is not None}) > 1]
        why = (
            f"{len(differing)} weights outside of the experts aren't the same on all ranks, {differing[0]} the first: "
            "load the same revision in the same dtype on every rank"
            if differing
            else "the ranks don't call parallelize together"
        )
        mismatch.args = (f"{why}\n{mismatch}",)
        raise


def _parts(name: str, weight: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors that hold a weight's bytes, by name: torchao packs one into several."""
    if not hasattr(weight, "__tensor_flatten__"):
        return {name: weight}
    inner: dict[str, Any] = {part: getattr(weight, part) for part in weight.__tensor_flatten__()[0]}
    tensors = {f"{name}.{part}": value for part, value in inner.items() if isinstance(value, torch.Tensor)}
    return {path: part for outer, value in tensors.items() for path, part in _parts(outer, value).items()}


def _hashes(weights: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Returns a hash of each tensor's shape, dtype, first numbers and the sum of all bit patterns."""
    bits = [tensor.flatten().view(_INTEGERS[tensor.element_size()]) for tensor in weights.values()]
    sums = torch.stack([each.sum(dtype=torch.int64) for each in bits]).tolist() if bits else []
    return {
        name: sha256(repr((tuple(tensor.shape), tensor.dtype, total, each[:_HEAD].tolist())).encode()).hexdigest()[:16]
        for (name, tensor), each, total in zip(weights.items(), bits, sums, strict=True)
    }


def keep_in_place(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Lets `model.to`, `half`, `cuda` and the like raise UsageError where they would move or convert the model,
    `save_pretrained`, `push_to_hub` and pickle in any case."""
    apply: Callable[..., Any] = model._apply

    def apply_nowhere_else(fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **given: Any) -> Any:
        moved = fn(torch.zeros(1, dtype=dtype, device=device))
        if (moved.device, moved.dtype) != (device, dtype):
            raise UsageError(
                f"a parallelized model stays on {device} in {dtype}, as its experts do, and can't go to {moved.device} "
                f"in {moved.dtype}: load it so, and then call parallelize"
            )
        return apply(fn, *args, **given)

    model.__dict__["_apply"] = apply_nowhere_else
    for name in ("save_pretrained", "push_to_hub"):  # the latter would make an empty repository first
        model.__dict__[name] = refusing(_NOT_SAVED)
    model.__dict__["__reduce_ex__"] = refuse_to_copy  # pickle meets the class that `load_without_experts` made first


def keep_out_of_state(block: nn.Module, not_saved: str = _NOT_SAVED, not_loaded: str = _NOT_LOADED) -> None:
    """Lets `state_dict` and `load_state_dict` of every module around `block` raise UsageError, with these texts."""
    block.register_state_dict_pre_hook(refusing(not_saved))
    block.register_load_state_dict_pre_hook(refusing(not_loaded))


def refusing(text: str) -> Callable[..., NoReturn]:
    """Returns a function of any arguments that raises UsageError."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UsageError(text)

    return refuse


# Takes the place of `__reduce_ex__`.
refuse_to_copy = refusing(
    "a parallelized model can't be pickled or deep-copied: its experts are on several ranks; copy it before "
    "parallelize, or load it once more"
)
