"""New weights through an executor's own preparation, into the tensors that its calls and captured graphs read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from eprt.config import MoEConfig, Routing, RuntimeConfig
from eprt.errors import ConfigError, UnsupportedError
from eprt.placement import ExpertShard
from eprt.rounding import ceil_div
from eprt.tokens import as_bytes
from eprt.weights import ExpertWeights


class Prepared(Protocol):
    """Says what is needed here of a PreparedExecutor."""

    config: MoEConfig
    shard: ExpertShard
    device: torch.device
    runtime: RuntimeConfig
    require_cold: Callable[[str], None]
    pattern: Any

    def slot_tensors(self) -> dict[str, torch.Tensor]: ...


def by_slot(executor: Prepared) -> bool:
    """Returns whether its experts lie apart, so that single ones can be written."""
    try:
        executor.slot_tensors()
    except UnsupportedError:
        return False
    return True


PIECES = 8  # experts are prepared in so many pieces of a layer: memory beside the layer, against launches


@torch.inference_mode()
def write_slots(executor: Prepared, weights: ExpertWeights, slots: Sequence[int]) -> None:
    """Prepares the experts of `weights`, some at a time, and writes each to its slot.

    Args:
        executor: one whose `slot_tensors` are all that it made of its weights.
        weights: [len(slots)] experts.

    Raises:
        ConfigError: values that need another layout than the executor's; the pieces before them are written by then.
    """
    held, config, whole = executor.slot_tensors(), executor.config, executor.shard
    step = ceil_div(whole.num_local_experts, PIECES)
    for start in range(0, len(slots), step):
        some = slots[start : start + step]
        count = len(some)
        few = replace(config, num_experts=count, top_k=min(config.top_k, count), routing=Routing())
        shard = ExpertShard(count, 0, count, whole.moe_tp_rank, whole.moe_tp_size)
        own = weights.map(lambda tensor: tensor[start : start + count])  # noqa: B023
        made = _like(executor, few, shard, own).slot_tensors()
        _require_alike({n: t[0] for n, t in held.items()}, {n: t[0] for n, t in made.items()})
        target = torch.tensor(some, device=executor.device)
        for name, tensor in made.items():
            as_bytes(held[name]).index_copy_(0, target, as_bytes(tensor))


@torch.inference_mode()
def write_whole(executor: Prepared, weights: ExpertWeights) -> None:
    """Prepares all of a layer's experts, and writes them over those that the executor holds. Costs one layer's memory.

    Raises:
        ConfigError: values that need another layout, or that kernels have as constants; nothing is written then.
    """
    new, held = leaves(_like(executor, executor.config, executor.shard, weights)), leaves(executor)
    _require_alike({name: held[name] for name in new if name in held}, new)
    for name, value in new.items():
        if isinstance(value, torch.Tensor):
            held[name].copy_(value)


def leaves(root: object) -> dict[str, Any]:
    """Returns the tensors and the floating-point numbers that an object holds, and each None, by the path to each: in
    containers, and in objects of eprt's or of its own package."""
    return dict(_leaves(vars(root), "", set(), ("eprt.", type(root).__module__.partition(".")[0] + ".")))


def _leaves(value: Any, path: str, seen: set[int], packages: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor | float | None):
        yield path, value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    inside: Mapping[Any, Any] = {}
    if isinstance(value, dict):
        inside = value
    elif isinstance(value, list | tuple):
        inside = dict(enumerate(value))
    elif f"{type(value).__module__}.".startswith(packages):
        inside = getattr(value, "__dict__", {})
    for name, part in inside.items():
        yield from _leaves(part, f"{path}.{name}", seen, packages)


def _like(executor: Prepared, config: MoEConfig, shard: ExpertShard, weights: ExpertWeights) -> Prepared:
    """Returns an executor of the same kind and layout with these experts."""
    made: Any = object.__new__(type(executor))
    made.pattern = executor
    made.__init__(config, shard, weights, executor.device, executor.runtime, executor.require_cold)
    made.pattern = None
    return made


def _require_alike(held: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    """Raises ConfigError unless the new tensors are where the old ones are, in their layouts, and numbers are the
    same."""
    for name, new in made.items():
        found, expected = _layout(new), _layout(held.get(name))
        if found != expected:
            raise ConfigError(
                f"prepared experts have {name.lstrip('.')} as {found}, the layer holds {expected}: the new values need "
                "another layout or another kernel; build the layer again"
            )
    if missing := held.keys() - made.keys():
        raise ConfigError(f"prepared experts lack {sorted(missing)}, which the layer holds: build the layer again")


def _layout(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value
