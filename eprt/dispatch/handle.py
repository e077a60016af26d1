"""State of one call, from its dispatch to its combine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import torch

from eprt.errors import UsageError
from eprt.tokens import ExpertMajorTokens, FlatTokens


class CallState:
    """What a dispatcher's combine needs of its dispatch: each dispatcher's own class."""


if TYPE_CHECKING:
    from eprt.world import World

S = TypeVar("S", bound=CallState)


@dataclass(frozen=True)
class Traffic:
    """What one call moved between this rank and others (local copies don't count), dispatch and combine together."""

    rows_sent: int = 0
    rows_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


class HandleOwner(Protocol):
    """The dispatcher, as its handles know it."""

    world: World

    def _wait(self, handle: Handle) -> None: ...

    def _abandon(self, handle: Handle) -> None: ...


@dataclass
class Handle:
    """State of one call. `combine` consumes it once; `close` (in a `finally`) frees what a failed call left.

    Attributes:
        call: number of this dispatch on its dispatcher, equal on all ranks.
        num_tokens, tokens_per_rank: this rank's T and the agreed R.
        state: the dispatcher's own; dropped on close.
        traffic: what moved, where the host knows it; else None.
        deferred: the rows may still be on their way; `wait` before anything reads them.
        generation: of the World when it was made; what was open when a rank was lost is discarded.
        shape: of the expert output that `combine` takes: the tokens' shape.
    """

    owner: HandleOwner
    call: int
    num_tokens: int
    tokens_per_rank: int
    dtype: torch.dtype
    state: CallState | None = None
    traffic: Traffic | None = None
    deferred: bool = False
    status: Literal["open", "combined", "closed"] = field(default="open", compare=False)
    shape: tuple[int, ...] | None = None
    generation: int = 0

    def kept(self, kind: type[S]) -> S:
        """`state`, for the dispatcher that put it there.

        Raises:
            UsageError: it is gone, as the call has ended, or another's.
        """
        if not isinstance(self.state, kind):
            raise UsageError(f"the handle is {self.status} and holds no {kind.__name__}: dispatch again for a new one")
        return self.state

    def wait(self) -> None:
        """Until the rows have arrived, in stream order. Idempotent; for `dispatch(..., wait=False)` alone."""
        if self.deferred and self.status == "open":
            self.owner._wait(self)
        self.deferred = False

    def close(self) -> None:
        """Idempotent."""
        if self.status == "open":
            self.owner._abandon(self)
            self.status = "closed"
        self.state = None


@dataclass(frozen=True)
class Dispatched:
    """What `dispatch` returns: tokens for the executor, and the handle for `combine`."""

    tokens: FlatTokens | ExpertMajorTokens
    handle: Handle
