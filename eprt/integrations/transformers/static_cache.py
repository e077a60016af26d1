"""A key/value cache at fixed addresses: every batch size sees the first rows of the same memory.

transformers' own StaticCache belongs to one batch size, and its sliding layers decide on the host what they do, which a
CUDA graph can't replay. Here each layer is as long as the whole sequence; masks leave out what is outside a window.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DummyLayer, StaticLayer, get_layer_types_and_kwargs

_FULL = ("full_attention", "sliding_attention", "chunked_attention")


def refusal(config: Any) -> str:
    """Returns why a model can't be run over such a cache, or ""."""
    types, _ = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    others = sorted({kind for kind in types if kind not in (*_FULL, "dummy")})
    return f"its cache has layers of {', '.join(others)}" if others else ""


class StaticRows:
    """The cache of at most `rows` sequences of at most `length` tokens.

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
        """Begins sequences of no tokens. What is left in memory is behind the mask."""
        self.position.zero_()
        self.begun = False

    def view(self, rows: int) -> Any:
        """Returns transformers' Cache of the first `rows` sequences."""
        if rows not in self._views:
            layers: list[Any] = [
                DummyLayer() if kind == "dummy" else _Layer(number, rows, self)
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
