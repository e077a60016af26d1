"""The header exchange: ranks compare what they are about to do before payload moves.

gloo neither notices a skipped call nor a size mismatch (a longer send kills its innocent receiver, a shorter one
leaves stale bytes), so every dispatch and combine on gloo starts here; GPU worlds do it with validate="full", and
whenever R has to be agreed. Every world does it when a layer is loaded or built, before memory is shared. A rank whose
own input is bad still takes part and says so, and then every rank raises the same error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from eprt.errors import EprtError, WorldMismatch, rebuild_error
from eprt.world.collectives import Collectives

MAGIC = 0x65707274  # "eprt"
_OPERATIONS = ("dispatch", "combine", "load", "build", "warmup", "barrier")
_DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.uint8, torch.float8_e4m3fn)
_TEXT_BYTES = 2048


@dataclass(frozen=True)
class Header:
    """One rank's view of the call.

    `num_tokens` may differ between ranks, `replicas` (tokens that an attention-TP group holds together) between
    groups; everything else must be equal. Where fingerprints differ, `settings` are what they were made of: the table
    then shows the ones that aren't equal.
    """

    operation: str
    layer: int
    call: int
    num_tokens: int = 0
    tokens_per_rank: int = 0
    dtype: torch.dtype | None = torch.bfloat16  # None: one without a code
    fingerprint: int = 0
    replicas: int = 0
    generation: int = 0
    step: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)

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
            dtype=_DTYPES[dtype] if dtype >= 0 else None,
            fingerprint=fingerprint,
            replicas=replicas,
            generation=generation,
            step=step,
        )


def fingerprint_of(settings: Mapping[str, str]) -> int:
    """63-bit hash of names and values, whatever their order."""
    digest = hashlib.sha256(repr(sorted(settings.items())).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


_COMPARED = ("generation", "step", "operation", "layer", "call", "tokens_per_rank", "dtype", "fingerprint")


def exchange(world: Collectives, header: Header, error: EprtError | None = None) -> list[Header]:
    """Every rank's header, in rank order. Collective.

    Raises:
        the error of the lowest rank that has one, with its rank in the text unless all ranks have the same.
        WorldMismatch: a table of the fields that differ, the same on every rank.
    """
    local = replace(header, generation=world.generation, step=world.step)
    world.note(header.operation, None if header.layer < 0 else header.layer)
    rows = world.gather_control(torch.tensor(local.encode(error is not None), dtype=torch.int64)).tolist()
    headers = [Header.decode(row) for row in rows]
    failed = [rank for rank, row in enumerate(rows) if row[1]]
    if failed:
        found = _shared_error(world, failed[0], error)
        found.shared = True
        raise found
    differing = [name for name in _COMPARED if len({getattr(h, name) for h in headers}) > 1]
    size = world.parallel.attention_tp_size
    groups = [{h.replicas for h in headers[first : first + size]} for first in range(0, len(headers), size)]
    if any(len(group) > 1 for group in groups):
        differing.append("replicas")
    if "operation" in differing:  # all else follows from it
        differing = ["operation"]
    if differing:
        columns = {name: [str(getattr(h, name)).removeprefix("torch.") for h in headers] for name in differing}
        if "fingerprint" in differing:
            columns |= _differing_settings(world, local)
        mismatch = WorldMismatch(_table(columns))
        mismatch.shared = True
        raise mismatch
    return headers


def _shared_error(world: Collectives, rank: int, error: EprtError | None) -> EprtError:
    """The lowest failing rank's error, as every rank sees it; the whole of it where all ranks say the same."""
    texts = _share_text(world, "" if error is None else f"{type(error).__name__}\n{error}")
    if error is not None and len(set(texts)) == 1:
        return error
    name, _, message = texts[rank].partition("\n")
    return rebuild_error(name, message if message.startswith(f"rank {rank}") else f"rank {rank}: {message}")


def _differing_settings(world: Collectives, local: Header) -> dict[str, list[str]]:
    """Every rank's value of the settings that aren't equal, cut to what fits a text."""
    # One a line and sorted: a text that is cut loses the same last names everywhere.
    texts = _share_text(world, "\n".join(json.dumps(item) for item in sorted(local.settings.items())))
    known: list[dict[str, str]] = [
        dict(json.loads(line) for line in text.splitlines() if line.endswith("]")) for text in texts
    ]
    names = sorted({name for settings in known for name in settings})
    columns = {name: [settings.get(name, "-") for settings in known] for name in names}
    return {name: values for name, values in columns.items() if len(set(values)) > 1}


def _share_text(world: Collectives, text: str) -> list[str]:
    """Every rank's text, cut to `_TEXT_BYTES`. Collective."""
    encoded = text.encode(errors="replace")[:_TEXT_BYTES]
    buffer = torch.frombuffer(bytearray(encoded.ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8)
    rows = world.gather_control(buffer)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in rows]


def _table(columns: dict[str, list[str]]) -> str:
    """One line a rank, one column for each thing that differs."""
    lines = [f"the ranks disagree about this call ({', '.join(columns)}); make the same calls on every rank:"]
    widths = [max(16, *(len(cell) for cell in (name, *cells))) for name, cells in columns.items()]
    rows = [
        ["rank", *columns],
        *([str(rank), *cells] for rank, cells in enumerate(zip(*columns.values(), strict=True))),
    ]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, [6, *widths], strict=True)) for row in rows]
    return "\n".join(lines)
