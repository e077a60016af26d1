"""The header exchange: ranks compare what they are about to do before payload moves.

gloo neither notices a skipped call nor a size mismatch (a longer send kills its innocent receiver, a shorter one
leaves stale bytes), so every dispatch and combine on gloo starts here; GPU worlds do it with validate="full", at
warm-up, and whenever R has to be agreed. A rank whose own input is bad still takes part and says so, and then every
rank raises the same error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from eprt.errors import EprtError, WorldMismatch, rebuild_error

if TYPE_CHECKING:
    from eprt.world import World

MAGIC = 0x65707274  # "eprt"
_OPERATIONS = ("dispatch", "combine", "warmup", "load", "calibrate")
_DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.uint8, torch.float8_e4m3fn)
_TEXT_BYTES = 2048


@dataclass(frozen=True)
class Header:
    """One rank's view of the call. `num_tokens` may differ between ranks, `replicas` (tokens that an attention-TP
    group holds together) between groups; everything else must be equal."""

    operation: str
    layer: int
    call: int
    num_tokens: int = 0
    tokens_per_rank: int = 0
    dtype: torch.dtype = torch.bfloat16
    fingerprint: int = 0
    replicas: int = 0
    generation: int = 0
    step: int = 0

    def encode(self, failed: bool) -> list[int]:
        dtype = _DTYPES.index(self.dtype) if self.dtype in _DTYPES else -1
        return [
            MAGIC,
            int(failed),
            self.generation,
            self.step,
            _OPERATIONS.index(self.operation),
            self.layer,
            self.call,
            self.num_tokens,
            self.tokens_per_rank,
            dtype,
            self.fingerprint,
            self.replicas,
        ]

    @classmethod
    def decode(cls, row: list[int]) -> Header:
        _, _, generation, step, operation, layer, call, tokens, agreed, dtype, fingerprint, replicas = row
        return cls(
            operation=_OPERATIONS[operation],
            layer=layer,
            call=call,
            num_tokens=tokens,
            tokens_per_rank=agreed,
            dtype=_DTYPES[dtype],
            fingerprint=fingerprint,
            replicas=replicas,
            generation=generation,
            step=step,
        )


_COMPARED = ("generation", "step", "operation", "layer", "call", "tokens_per_rank", "dtype", "fingerprint")


def exchange(world: World, header: Header, error: EprtError | None = None) -> list[Header]:
    """Every rank's header, in rank order. Collective.

    Raises:
        the error of the lowest rank that has one, with its rank in the text, the same on every rank.
        WorldMismatch: a table of the fields that differ, the same on every rank.
    """
    local = replace(header, generation=world.generation, step=world.step)
    world.note(header.operation, header.layer)
    rows = world.gather_control(torch.tensor(local.encode(error is not None), dtype=torch.int64)).tolist()
    headers = [Header.decode(row) for row in rows]
    failed = [rank for rank, row in enumerate(rows) if row[1]]
    if failed:
        raise _shared_error(world, failed[0], error)
    differing = [name for name in _COMPARED if len({getattr(h, name) for h in headers}) > 1]
    size = world.parallel.attention_tp_size
    groups = [{h.replicas for h in headers[first : first + size]} for first in range(0, len(headers), size)]
    if any(len(group) > 1 for group in groups):
        differing.append("replicas")
    if differing:
        raise WorldMismatch(_table(headers, differing))
    return headers


def _shared_error(world: World, rank: int, error: EprtError | None) -> EprtError:
    """The lowest failing rank's error, as every rank sees it."""
    text = "" if error is None else f"{type(error).__name__}\n{error}"
    buffer = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
    encoded = text.encode()[:_TEXT_BYTES]
    buffer[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8) if encoded else buffer[:0]
    shared = bytes(world.gather_control(buffer)[rank].tolist()).rstrip(b"\0").decode(errors="ignore")
    name, _, message = shared.partition("\n")
    return rebuild_error(name, message if message.startswith("rank ") else f"rank {rank}: {message}")


def _table(headers: list[Header], differing: list[str]) -> str:
    lines = [f"the ranks disagree about this call ({', '.join(differing)}); make the same calls on every rank:"]
    lines.append("  rank  " + "  ".join(f"{name:>16}" for name in differing))
    for rank, header in enumerate(headers):
        cells = (str(getattr(header, name)).removeprefix("torch.") for name in differing)
        lines.append(f"  {rank:>4}  " + "  ".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)
