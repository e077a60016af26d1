"""What jobs and tests of several folders build alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from eprt.errors import EprtError

NOTHING = "nothing was raised"


def said(call: Callable[[], object]) -> str:
    """Returns the type and the text of the typed error that a call raises, or NOTHING."""
    try:
        call()
    except EprtError as error:
        return f"{type(error).__name__}: {error}"
    return NOTHING


def whole_numbers(*shape: int, seed: int) -> torch.Tensor:
    """Returns float32 values from -3 to 3: their sums are exact in any order."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def distinct_experts(T: int, E: int, K: int, generator: torch.Generator) -> torch.Tensor:
    """Returns [T, K] int32 ids; no token chooses an expert twice."""
    return torch.rand(T, E, generator=generator, device=generator.device).argsort(1)[:, :K].to(torch.int32)


def told_alike(found: Sequence[tuple[str, bool]]) -> str:
    """Returns the error that every rank was told, in the same words. What each one did next must have worked."""
    (told,) = {told for told, _ in found}
    assert all(works for _, works in found), found
    return told
