"""Per-sequence state inside transformers' generation loop: where each sequence of a batch ends, and its own random
numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from transformers import LogitsProcessor, StoppingCriteria, StoppingCriteriaList, StopStringCriteria

from eprt.errors import ConfigError


class Ends(StoppingCriteria):
    """Applies other criteria, and records where each sequence of the batch met one first.

    transformers pads a sequence that ended until the longest one has; without a record a pad can't be told from a
    token that the model chose.

    Args:
        criteria: transformers' or the caller's own, each of which returns bool [rows].
        prompt_length: tokens of each row before the first new one.

    Attributes:
        lengths: new tokens of each row that has ended, by row.
    """

    def __init__(self, criteria: Sequence[Any], prompt_length: int) -> None:
        self._criteria, self._prompt_length = StoppingCriteriaList(criteria), prompt_length
        self.lengths: dict[int, int] = {}

    def __call__(self, input_ids: Any, scores: Any, **more: Any) -> Any:
        """Returns bool [rows]: the rows that have ended."""
        done: torch.Tensor = self._criteria(input_ids, scores, **more)
        for row in done.nonzero().flatten().tolist():
            self.lengths.setdefault(row, input_ids.shape[1] - self._prompt_length)
        return done


def stops_at(strings: str | Sequence[str], tokenizer: Any) -> StoppingCriteria:
    """Returns transformers' criterion of text that ends a sequence. Raises ConfigError: no tokenizer, or text that its
    tokens can't spell."""
    if tokenizer is None:
        raise ConfigError(f"stop_strings={strings!r} need the model's tokenizer: pass tokenizer= as well")
    try:
        return StopStringCriteria(tokenizer, [strings] if isinstance(strings, str) else list(strings))
    except ValueError as error:
        raise ConfigError(f"stop_strings={strings!r}: the tokenizer has no tokens that end them") from error


class SeededChoice(LogitsProcessor):
    """Chooses each row's token by random numbers of its own, and leaves no other choice to the loop.

    A row's tokens then depend on its seed and its scores alone, not on the rows beside it. The choice is
    torch.multinomial's: the largest of probability / exponential noise.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Returns scores [rows, V] of which all but the chosen ones are -inf."""
        noise = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
        for row, generator in zip(noise, self._generators, strict=True):
            row.exponential_(generator=generator)
        probabilities = scores.float().softmax(-1)
        chosen = (probabilities / noise).argmax(-1, keepdim=True)
        nan = 0.0 * probabilities.sum(-1, keepdim=True)  # of scores that have no probabilities: the loop refuses NaN
        return torch.full_like(scores, -torch.inf).scatter_(-1, chosen, 0.0) + nan.to(scores.dtype)


def chosen_last(model: Any, choice: LogitsProcessor) -> AbstractContextManager[Any]:
    """Lets `choice` be the last of the model's logits processors inside the block.

    Those that `model.generate` is given run before temperature, top-k and top-p.
    """
    prepare: Callable[..., Any] = model._get_logits_processor

    def prepared(*args: Any, **given: Any) -> Any:
        processors = prepare(*args, **given)
        processors.append(choice)
        return processors

    return patch.object(model, "_get_logits_processor", prepared)
