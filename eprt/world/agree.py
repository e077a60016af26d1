"""The header exchange: ranks compare what they are about to do before payload moves.

gloo neither notices a skipped call nor a size mismatch (a longer send kills its innocent receiver, a shorter one
leaves stale bytes), so every dispatch and combine on gloo starts here; GPU worlds do it with validate="full", and
whenever R has to be agreed. Every world does it when a layer is loaded or built, before memory is shared. A rank whose
own input is bad still takes part and says so, and then every rank raises the same error.

Inside a step (`World.step`) R was agreed on, so GPU worlds compare nothing; the next step compares what they called.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from eprt.errors import EprtError, InputError, WorldMismatch, aligned, one_block, rebuild_error
from eprt.world.collectives import Collectives, Step

MAGIC = 0x65707274  # "eprt"
_OPERATIONS = ("dispatch", "combine", "load", "build", "warmup", "barrier", "step", "rebalance")
_DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.uint8, torch.float8_e4m3fn)
_DTYPE_CODES: dict[torch.dtype | None, int] = {dtype: code for code, dtype in enumerate(_DTYPES)}
_TEXT_BYTES = 2048
MAX_WORDS = 8
_INT64 = 1 << 63


@dataclass(slots=True)
class Header:
    """One rank's view of the call.

    `num_tokens` and `words` may differ between ranks, `group_tokens` (tokens that an attention-TP group holds together)
    between groups; everything else must be equal, the number of words too. Where fingerprints differ, `settings` are
    what they were made of: the table then shows the ones that aren't equal.
    """

    operation: str
    layer: int = -1
    call: int = 0
    num_tokens: int = 0
    tokens_per_rank: int = 0
    dtype: torch.dtype | None = torch.bfloat16  # None: one without a code
    fingerprint: int = 0
    group_tokens: int = 0
    step: int = 0
    words: tuple[int, ...] = ()
    settings: Mapping[str, str] | None = None

    def encode(self, world: Collectives, failed: bool) -> list[int]:
        """Returns the header as a row of one length: `_ROW`, then the words."""
        return [
            MAGIC ^ world.nonce,
            int(failed),
            world.generation,
            self.step,
            _OPERATIONS.index(self.operation),
            self.layer,
            self.call,
            self.tokens_per_rank,
            _DTYPE_CODES.get(self.dtype, -1),
            self.fingerprint,
            len(self.words),
            self.num_tokens,
            self.group_tokens,
            *self.words,
            *(0,) * (MAX_WORDS - len(self.words)),
        ]


# The columns of a header on its way. What must be equal on all ranks comes first; "words" is their number.
_ROW = (
    "nonce", "failed", "generation", "step", "operation", "layer", "call", "tokens_per_rank", "dtype", "fingerprint",
    "words", "num_tokens", "group_tokens",
)  # fmt: skip
_EQUAL, _TOKENS, _WORDS = 11, 11, 13  # of a row: how many first words are equal, where T and the words are


def fingerprint_of(settings: Mapping[str, str]) -> int:
    """Returns a 63-bit hash of names and values, whatever their order."""
    digest = hashlib.sha256(repr(sorted(settings.items())).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def exchange(
    world: Collectives, header: Header, error: EprtError | None = None
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Compares the ranks' headers, and returns every rank's tokens, [W], and words, [W, n]. Collective.

    Raises:
        the error of the lowest rank that has one, with its rank in the text unless all ranks have the same.
        WorldMismatch: a table of the fields that differ, the same on every rank.
    """
    if header.operation == "step":
        world.note(f"the start of step {header.step}")
    else:
        header.step = world.step_number
        world.note(header.operation, None if header.layer < 0 else header.layer)
    own = header.encode(world, error is not None)
    rows = world.gather_words(own)
    if not all(world.alive):  # who is gone agrees, and brings nothing
        gone = (*own[:1], 0, *own[2:_EQUAL], *(0,) * (len(own) - _EQUAL))
        rows = [row if alive else gone for row, alive in zip(rows, world.alive, strict=True)]
    size = world.parallel.attention_tp_size
    equal = tuple(own[:_EQUAL])
    if error is not None or any(row[:_EQUAL] != equal for row in rows) or (size > 1 and _uneven(rows, size)):
        _raise_difference(world, header, rows, error)
    num_words = len(header.words)
    return tuple(row[_TOKENS] for row in rows), tuple(row[_WORDS : _WORDS + num_words] for row in rows)


@contextmanager
def shared_errors(world: Collectives, header: Header) -> Iterator[None]:
    """Lets an EprtError of the block be one on all ranks: an `exchange` is what those whose block succeeds do next."""
    try:
        yield
    except EprtError as error:
        exchange(world, header, error)  # raises on every rank, here included
        raise


def _uneven(rows: Sequence[Sequence[int]], size: int) -> bool:
    """Returns whether ranks of one attention-TP group hold different numbers of tokens."""
    groups = [{row[_TOKENS + 1] for row in rows[first : first + size]} for first in range(0, len(rows), size)]
    return any(len(group) > 1 for group in groups)


def _raise_difference(
    world: Collectives, header: Header, rows: Sequence[Sequence[int]], error: EprtError | None
) -> None:
    """Raises the error that the rows call for; returns if they differ in nothing that counts."""
    failed = [rank for rank, row in enumerate(rows) if row[1]]
    if failed:
        found = _shared_error(world, failed[0], error)
        found.shared = True
        raise found
    differing = [name for name in _ROW[:_EQUAL] if _differs(name, rows)]
    if _uneven(rows, world.parallel.attention_tp_size):
        differing.append("group_tokens")
    if "operation" in differing:  # all else follows from it
        differing = ["operation"]
    if not differing:
        return
    ranks = [rank for rank, alive in enumerate(world.alive) if alive]
    columns = {name: [_shown(name, rows[rank]) for rank in ranks] for name in differing}
    if "fingerprint" in differing:
        columns |= _differing_settings(world, header)
    mismatch = WorldMismatch(_table(ranks, columns))
    mismatch.shared = True
    raise mismatch


def _differs(name: str, rows: Sequence[Sequence[int]]) -> bool:
    values = {row[_ROW.index(name)] for row in rows}
    if name == "fingerprint" and {_shown("operation", row) for row in rows} == {"step"}:
        values.discard(0)  # a rank whose host made no layer call replayed a graph: there is nothing to compare
    return len(values) > 1


def _shown(name: str, row: Sequence[int]) -> str:
    """Returns a column of a row as the table shows it."""
    value = row[_ROW.index(name)]
    if name == "operation":
        return _OPERATIONS[value]
    if name == "dtype":
        return str(_DTYPES[value] if value >= 0 else None).removeprefix("torch.")
    if name == "words":
        return str(tuple(row[_WORDS : _WORDS + value]))
    return str(value ^ MAGIC if name == "nonce" else value)


def agree_step(
    world: Collectives, num_tokens: object, number: object = None, words: object = (), error: EprtError | None = None
) -> Step:
    """Begins a step with an exchange of headers. Collective; raises as `World.step` says, and this rank's `error`."""
    tokens, said = 0, world.step_number + 1
    own: tuple[int, ...] = ()
    try:
        tokens = _checked_count("num_tokens", num_tokens)
        said = said if number is None else _checked_count("number", number)
        own = _checked_words(words)
    except EprtError as found:
        error = error or found
    log = world.take_call_log()
    header = Header("step", -1, 0, tokens, group_tokens=tokens, step=said, words=own)
    header.fingerprint, header.settings = log.fingerprint, log.settings
    return Step(said, *exchange(world, header, error), world.buckets)


def _checked_count(name: str, value: object) -> int:
    """Raises InputError unless it is an int that fits in int64 and isn't negative."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _INT64:
        raise InputError(f"{name} {value!r}: expected an int from 0 to 2^63 - 1")
    return value


def _checked_words(words: object) -> tuple[int, ...]:
    """Raises InputError unless they are at most `MAX_WORDS` ints that fit in int64."""
    found = tuple(words) if isinstance(words, (tuple, list)) else None
    if found is None or len(found) > MAX_WORDS:
        raise InputError(f"words {words!r}: expected a sequence of at most {MAX_WORDS} ints")
    for word in found:
        if not isinstance(word, int) or not -_INT64 <= word < _INT64:
            raise InputError(f"words {words!r}: {word!r} is no int64")
    return tuple(int(word) for word in found)


def _shared_error(world: Collectives, rank: int, error: EprtError | None) -> EprtError:
    """Returns the lowest failing rank's error as every rank sees it; unchanged if all ranks raise the same."""
    texts = _share_text(world, "" if error is None else f"{type(error).__name__}\n{error}")
    if error is not None and len({*texts.values()}) == 1:
        return error
    name, _, message = texts[rank].partition("\n")
    return rebuild_error(name, message if message.startswith(f"rank {rank}") else f"rank {rank}: {message}")


def _differing_settings(world: Collectives, local: Header) -> dict[str, list[str]]:
    """Returns the value of each rank that is left, of the settings that differ, cut to what fits a text."""
    # One a line and sorted: a text that is cut loses the same last names everywhere.
    texts = _share_text(world, "\n".join(json.dumps(item) for item in sorted((local.settings or {}).items())))
    known: list[dict[str, str]] = [
        dict(json.loads(line) for line in text.splitlines() if line.endswith("]")) for text in texts.values()
    ]
    names = sorted({name for settings in known for name in settings})
    columns = {name: [one_block(str(settings.get(name, "-"))) for settings in known] for name in names}
    return {name: values for name, values in columns.items() if len(set(values)) > 1}


def _share_text(world: Collectives, text: str) -> dict[int, str]:
    """Returns the text of every rank that is left, cut to `_TEXT_BYTES`. Collective."""
    encoded = text.encode(errors="replace")[:_TEXT_BYTES]
    buffer = torch.frombuffer(bytearray(encoded.ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8)
    rows = world.gather_control(buffer)
    found = [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in rows]
    return {rank: one_block(text, _TEXT_BYTES) for rank, text in enumerate(found) if world.alive[rank]}


def _table(ranks: Sequence[int], columns: dict[str, list[str]]) -> str:
    """Returns a table with one line per rank and one column per thing that differs."""
    title = f"the ranks disagree about this call ({', '.join(columns)}); make the same calls on every rank:"
    rows = [[str(rank), *cells] for rank, *cells in zip(ranks, *columns.values(), strict=True)]
    return f"{title}\n{aligned([['rank', *columns], *rows])}"
