"""Notes which of a layer's expert parameters an engine has loaded, and asks for room where it loads them again.

The engine's parameters are freed when their experts are prepared. New weights come in two ways: vLLM's layerwise reload
(`reload_weights`, weight transfer) makes the parameters anew, and `model.load_weights`, as trainers and all of SGLang's
updates call it, writes into those that are there. Either may bring some of the experts only.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from eprt.errors import CheckpointError

MATRICES = ("_weight", "_weight_packed", "_qweight")  # ends of their names: no expert is whole without them
WHOLE = -1  # in place of an expert's number: a loader that isn't told of experts fills all of them


class Received:
    """The parameters of one layer that were loaded since its experts were prepared last.

    Some models load with several threads at once.

    Args:
        name: the engine's name of the layer.
        num_experts: L, the experts that this rank loads.

    Attributes:
        matrices: the parameters that a load brings in any case.
    """

    def __init__(self, name: str, num_experts: int) -> None:
        self._name, self.num_experts = name, num_experts
        self.matrices: set[str] = set()
        self._parts: dict[int, set[tuple[str, str]]] = defaultdict(set)  # expert -> (parameter, shard)
        self._expected: set[tuple[str, str]] = set()  # of each expert, by the first load
        self._by_expert = False  # whether that load named any
        self._lock = threading.Lock()

    def add(self, parameter: str, expert: int, shard: str) -> None:
        """Notes that a loader wrote this part of an expert, or of all of them (`WHOLE`)."""
        with self._lock:
            self._parts[expert].add((parameter, shard))

    def of(self, parameter: str) -> bool:
        """Returns whether anything of this parameter was loaded, for all that is known: nothing is noted of what an
        engine writes past the loaders."""
        return not self._parts or any(name == parameter for parts in self._parts.values() for name, _ in parts)

    def experts(self) -> list[int]:
        """Returns the local experts of which all parts came, in order.

        Raises:
            CheckpointError: of some experts a part is missing.
        """
        with self._lock:
            loaded = {expert: set(parts) for expert, parts in self._parts.items()}
        if not loaded:
            return list(range(self.num_experts))
        whole = {name for name, _ in loaded.get(WHOLE, set())}  # stands for all of the parameter's shards
        every = {e: parts for e, parts in loaded.items() if e != WHOLE}
        known = self._expected if self._by_expert or not every else set()  # vLLM copies its dummy weights
        every = every or {e: set() for e in range(self.num_experts)}
        came = {name for parts in loaded.values() for name, _ in parts}
        absent = {(name, "") for name in self.matrices - came}
        expected = known or max(every.values(), key=len) | absent  # a first load may be a part itself
        expected = {part for part in expected if part[0] not in whole}
        if lacking := {e: expected - parts for e, parts in every.items() if expected - parts}:
            expert, parts = next(iter(lacking.items()))
            missing = ", ".join(sorted(f"{name} ({shard})" if shard else name for name, shard in parts))
            raise CheckpointError(
                f"{self._name}: of {len(lacking)} experts a part wasn't loaded (local expert {expert}: {missing}); "
                "load whole experts, all parts of each"
            )
        return sorted(every)

    @property
    def lacking(self) -> str:
        """Says of which experts a part is missing, or "" where all came whole."""
        try:
            self.experts()
        except CheckpointError as reason:
            return str(reason)
        return ""

    @property
    def complete(self) -> bool:
        """Returns whether all parts of all experts came."""
        try:
            return bool(self._parts) and len(self.experts()) == self.num_experts
        except CheckpointError:
            return False

    def forget(self) -> None:
        """Begins the next load, of which each expert needs the parts that came this time."""
        named = [parts for e, parts in self._parts.items() if e != WHOLE]
        whole = self._parts.get(WHOLE, set())
        if not self._expected or (named and not self._by_expert):
            self._expected = max(({*parts, *whole} for parts in named), key=len, default={*whole})
            self._by_expert = bool(named)
        self._parts.clear()


def watch(layer: Any, name: str, parameter: Any, received: Received, room: Callable[[str, Any], None]) -> None:
    """Replaces a parameter's loader, and its `copy_`, by ones that call `room` with its name and itself, and note what
    they wrote. vLLM's gpt-oss in bf16 copies whole parameters and calls no loader. Idempotent.

    They hold no reference to the layer: vLLM keeps loaders for as long as the layer lives.
    """
    loader: Any = getattr(parameter, "weight_loader", None)
    if loader is None or hasattr(loader, "eprt"):
        return
    signature, owner = inspect.signature(loader), weakref.ref(layer)
    others = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")  # a wrapper's
    bound = getattr(loader, "__self__", None) is layer
    function: Any = loader.__func__ if bound else loader

    @contextmanager
    def writing(target: Any, experts: Iterable[int], shard: str) -> Iterator[None]:
        room(name, target)
        yield
        for expert in experts:
            received.add(name, expert, shard)  # not before: another thread may take what is complete

    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        own: Any = owner()
        given = signature.bind(*args, **kwargs).arguments
        given |= given.pop(others, {})
        target = next(iter(given.values()))
        expert = given.get("expert_id")
        local = WHOLE if expert is None else own._map_global_expert_id_to_local_expert_id(expert)
        # On meta, vLLM only counts how much would be written. Another rank's expert is not written: it may come when
        # this rank's are in the layer and freed already.
        written = not target.is_meta and (expert is None or local >= 0)
        if not written and target.numel() == 0:  # SGLang's NVFP4 would load other ranks' input scales, too
            return None
        # vLLM's Llama-4 brings all of the rank's experts at once, by the first one's number.
        all_of_them = expert is not None and getattr(given.get("loaded_weight"), "ndim", 0) == 3
        experts = range(received.num_experts) if all_of_them else [local]
        with writing(target, experts, given.get("shard_id") or "") if written else nullcontext():
            return function(own, *args, **kwargs) if bound else function(*args, **kwargs)

    noted.__signature__, noted.eprt = signature, True  # type: ignore[attr-defined]
    # SGLang's parameters with loaders of their own have a property without a setter.
    setattr(parameter, "_weight_loader" if hasattr(parameter, "_weight_loader") else "weight_loader", noted)

    def copied(*args: Any, **kwargs: Any) -> Any:
        own: Any = owner()
        target = getattr(own, name)
        with nullcontext() if target.is_meta else writing(target, [WHOLE], ""):
            return torch.Tensor.copy_(target, *args, **kwargs)

    parameter.copy_ = copied
