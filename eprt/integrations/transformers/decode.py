"""Replays decode steps from step graphs inside transformers' own loop, for `generate(graphs=...)`.

The loop calls `model.forward` as ever. A call that is a decode step (one token a sequence, over the cache that the
graphs know) becomes one of `StepGraphs`; a prompt runs eagerly, in the same steps of the World. A rank without
prompts replays the idle step.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import cache_utils
from transformers.cache_utils import Cache, StaticLayer, get_layer_types_and_kwargs
from transformers.modeling_outputs import CausalLMOutputWithPast

from eprt.errors import UsageError
from eprt.graphs import StepGraphs
from eprt.graphs.recording import refusal as pair_refusal
from eprt.integrations.transformers.agreement import ForwardAgreement
from eprt.integrations.transformers.dense import sharded_by_fsdp
from eprt.integrations.transformers.options import option_of

logger = logging.getLogger("eprt")
_ATTENTION = ("eager", "sdpa")  # whose masks transformers makes outside of the model, so that they can be inputs
_CACHED = ("full_attention", "sliding_attention", "chunked_attention")  # kinds of layers that the cache serves
# What a model calls its cache, in calls and outputs; transformers 5.24 renamed it.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
_CONSTANT = (CACHE, "use_cache", "return_dict", "logits_to_keep")
# What changes the loop or the cache. Values that change nothing are fine.
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "use_cache": (None, True),
    "past_key_values": (None,),
    "cache": (None,),
    "cache_implementation": (None,),
    "assistant_model": (None,),
    "assistant_early_exit": (None,),
    "prompt_lookup_num_tokens": (None,),
    "custom_generate": (None,),
}


def refusal(model: Any, agreement: ForwardAgreement, options: Mapping[str, Any]) -> str:
    """Returns why this model's decode steps can't be replayed from graphs with these options, or ""."""
    if (reason := model_refusal(model, options)) or agreement.world.device.type != "cuda":
        return reason
    return "; ".join(dict.fromkeys(reason for place in agreement.places if (reason := pair_refusal(place.layer))))


def model_refusal(model: Any, options: Mapping[str, Any]) -> str:
    """Returns why graphs of this model's decode steps are out of question wherever its experts are, or ""."""
    for name, ordinary in _OPTIONS.items():
        value = option_of(model, options, name)
        if not any(value is one or value == one for one in ordinary):
            return f"{name}={value!r} needs a loop or a cache of its own"
    if sharded_by_fsdp(model) is not None:
        return "FSDP gathers the dense weights in every forward"
    if getattr(model, "_compiled_call_impl", None) is not None:
        return "the model is compiled"
    if (attention := model.config.get_text_config(decoder=True)._attn_implementation) not in _ATTENTION:
        return f"attn_implementation={attention!r}: load the model with {' or '.join(map(repr, _ATTENTION))}"
    types, _ = get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))
    if others := sorted({kind for kind in types if kind not in (*_CACHED, "dummy")}):
        return f"its cache has layers of {', '.join(others)}"
    return ""


class DecodeGraphs:
    """A model's decode step in graphs, for batches of at most `rows` sequences of at most `length` tokens.

    Making one captures the graphs and is collective. `buckets` are the rows to capture for, the same on every rank.
    Raises ConfigError, WorldMismatch, CapacityError as `StepGraphs` and its capture.
    """

    def __init__(
        self, model: Any, agreement: ForwardAgreement, buckets: tuple[int, ...], rows: int, length: int
    ) -> None:
        self._agreement, self.world = agreement, agreement.world
        self._forward, self._held = model.forward, _held(model)
        keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._more = {"use_cache": True, "return_dict": True, **({"logits_to_keep": 1} if keeps else {})}
        self.cache = StaticRows(model.config, max(rows, *buckets), length, self.world.device)
        self.buckets, self._written, self._told = buckets, 0, False
        row = self._row(model)
        self._like = {name: (tensor.shape[1:], tensor.dtype) for name, tensor in row.items()}
        layers = [place.layer for place in agreement.places]
        self._graphs = StepGraphs(self.world, layers, self._step, row, buckets=buckets, idle=self._idle)
        with agreement.silent():
            self._graphs.capture()

    def serves(self, buckets: tuple[int, ...], rows: int, length: int) -> bool:
        """Returns whether these graphs suffice for such a call."""
        fits = self.buckets == buckets and self.cache.rows >= rows and self.cache.length >= length
        return fits and not self._graphs.stale

    def follows(self, model: Any) -> bool:
        """Returns whether the model has the weights, and applies the adapters, of the capture."""
        return self._held == _held(model)

    def begin(self, rows: int) -> dict[str, Any]:
        """Begins a batch and returns its cache, by the name that `model.generate` knows it by."""
        self.cache.begin()
        self._written = 0
        return {CACHE: self.cache.view(rows)}

    @contextmanager
    def inside(self, model: Any) -> Iterator[None]:
        """Takes the model's decode steps and idle steps from the graphs inside the block."""
        forward = model.forward

        @functools.wraps(forward)
        def replaying(*args: Any, **given: Any) -> Any:
            return self._call(*args, **given)

        idle = functools.partial(self._replay, 0)
        with patch.object(model, "forward", replaying), patch.object(self._agreement, "idle", idle):
            yield

    def _call(self, *args: Any, **given: Any) -> Any:
        """Runs in place of the model's forward."""
        cache, ids = next(filter(self.cache.owns, given.values()), None), given.get("input_ids")
        if ids is None or cache is None:
            return self._forward(*args, **given)
        rows, new = ids.shape
        if self._written + new > self.cache.length:
            raise UsageError(f"generation goes past {self.cache.length} tokens, which the graphs' cache is made for")
        tensors = _flat(given)
        if new == 1 and not args and self._fits(tensors, given, rows):
            output = CausalLMOutputWithPast(**{"logits": self._replay(rows, **tensors), CACHE: cache})
        else:
            output = self._forward(*args, **given)
        self._written += new
        self.cache.begun = True
        self.cache.position.add_(new)
        return output

    def _fits(self, tensors: Mapping[str, torch.Tensor], given: Mapping[str, Any], rows: int) -> bool:
        """Returns whether the graphs have all inputs of this call. A prompt of one token may have others."""
        found = {name: (tensor.shape[1:], tensor.dtype) for name, tensor in tensors.items()}
        more = [
            name
            for name, value in given.items()
            if name not in _CONSTANT and not isinstance(value, (torch.Tensor, dict)) and value not in (None, False)
        ]
        fits = found == self._like and not more and all(tensor.shape[0] == rows for tensor in tensors.values())
        if not fits and self._written and not self._told:
            self._told = True
            logger.warning("decode without step graphs: a step has other inputs (%s) than the graphs", [*found, *more])
        return fits

    def _replay(self, rows: int, **tensors: torch.Tensor) -> Any:
        with self._agreement.whole(rows):
            logits = self._graphs(rows, **tensors)
        self._graphs.wait()
        return logits

    # ---- what the graphs hold ---------------------------------------------------------------------------------

    def _step(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Computes [rows, 1, V] logits of one token per row."""
        cache = {CACHE: self.cache.view(inputs["input_ids"].shape[0])}
        return self._forward(**_nested(inputs), **cache, **self._more).logits[:, -1:]

    def _idle(self) -> None:
        for place in self._agreement.calls:
            place.idle()

    def _row(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Returns the inputs of a row without a token: it sees the first position alone."""
        whose: Any = model
        zero = torch.zeros(1, 1, dtype=torch.int64, device=self.world.device)
        self.cache.begin()
        begun = {"attention_mask": torch.ones_like(zero), CACHE: self.cache.view(1)}
        with torch.no_grad():
            positions = whose._prepare_position_ids_for_generation(zero, dict(begun))
            given = whose.prepare_inputs_for_generation(
                zero, next_sequence_length=1, position_ids=positions, use_cache=True, **begun
            )
        self.cache.begun = True
        return _flat(given)


def _held(model: nn.Module) -> tuple[Any, ...]:
    """Returns what a graph has fixed: where the weights lie, and which adapters PEFT's layers apply, or have merged."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "merged_adapters")]
    adapters = [(list(m.active_adapters), m.disable_adapters, list(m.merged_adapters)) for m in layers]
    return [weight.data_ptr() for weight in model.parameters()], adapters


def _flat(given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the tensors among a forward's arguments, [rows, ...]; those of a dict (masks per kind of layer) as
    `name/key`."""
    found: dict[str, torch.Tensor] = {}
    for name, value in given.items():
        parts = {f"{name}/{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
        found |= {key: _turned(key, part) for key, part in parts.items() if isinstance(part, torch.Tensor)}
    return found


def _nested(flat: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Undoes `_flat`."""
    found: dict[str, Any] = {}
    for path, tensor in flat.items():
        name, _, key = path.partition("/")
        tensor = _turned(name, tensor)
        if key:
            found.setdefault(name, {})[key] = tensor
        else:
            found[name] = tensor
    return found


def _turned(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Exchanges rows and axes of an image model's positions, which are [axes, rows, tokens]."""
    return tensor.transpose(0, 1) if name == "position_ids" and tensor.dim() == 3 else tensor


# ---- the cache ---------------------------------------------------------------------------------------------------


class StaticRows:
    """A key/value cache at fixed addresses, of at most `rows` sequences of at most `length` tokens: every batch size
    sees the first rows of the same memory.

    transformers' own StaticCache belongs to one batch size, and its sliding layers decide on the host what they do,
    which a CUDA graph can't replay. Here each layer is as long as the whole sequence; masks leave out what is outside
    a window.

    Attributes:
        position: int64 [] on the device: where the next token is written, in every sequence. The caller moves it.
        begun: whether something was written since `begin`.
        memory: keys and values of each layer, [rows, heads, length, width]; empty before its first forward.
    """

    def __init__(self, config: Any, rows: int, length: int, device: torch.device) -> None:
        self.rows, self.length, self.begun = rows, length, True
        self._kinds, _ = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        self.memory: list[tuple[torch.Tensor, ...]] = [() for _ in self._kinds]
        self._views: dict[int, Cache] = {}
        with torch.inference_mode(False):
            self.position = torch.zeros((), dtype=torch.int64, device=device)

    def begin(self) -> None:
        """Begins sequences of no tokens. What is left in memory would be behind the mask, but NaN goes through it."""
        for tensor in (tensor for layer in self.memory for tensor in layer):
            tensor.zero_()
        self.position.zero_()
        self.begun = False

    def view(self, rows: int) -> Any:
        """Returns transformers' Cache of the first `rows` sequences."""
        if rows not in self._views:
            layers: list[Any] = [
                cache_utils.DummyLayer() if kind == "dummy" else _Layer(number, rows, self)
                for number, kind in enumerate(self._kinds)
            ]
            self._views[rows] = Cache(layers=layers)
        return self._views[rows]

    def owns(self, cache: Any) -> bool:
        return any(cache is view for view in self._views.values())


class _Layer(StaticLayer):
    """The first rows of one layer's memory, which the first forward allocates: it tells heads, widths and dtype."""

    def __init__(self, number: int, rows: int, owner: StaticRows) -> None:
        super().__init__(max_cache_len=owner.length)
        self._number, self._rows, self._owner = number, rows, owner
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        owner = self._owner
        if not owner.memory[self._number]:
            with torch.inference_mode(False):
                owner.memory[self._number] = tuple(
                    torch.zeros(owner.rows, x.shape[1], owner.length, x.shape[3], dtype=x.dtype, device=x.device)
                    for x in (key_states, value_states)
                )
        keys, values = (tensor[: self._rows] for tensor in owner.memory[self._number])
        positions = torch.arange(key_states.shape[-2], device=keys.device) + owner.position
        keys.index_copy_(2, positions, key_states)
        values.index_copy_(2, positions, value_states)
        return keys, values

    def get_seq_length(self) -> Any:
        """Returns a tensor from the second forward on, as transformers' own static layers do: nothing may be read on
        the host inside a graph."""
        return self._owner.position if self._owner.begun else 0
