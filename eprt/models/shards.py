"""Reads one safetensors file: its header, checked, and slices of its tensors.

Slices are read with `pread` into memory of ours, not mapped. A file that shrinks, or a disk that fails, while it is
read is then an error that names the file, where a mapping would end the process with SIGBUS. Numbers are checked to be
finite piece by piece as they arrive.

Format: https://huggingface.co/docs/safetensors. The library itself judges each header of a size that we read. A name
that appears twice, of which the library takes the last, is refused here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from eprt.errors import CheckpointError
from eprt.json_files import parse_object, shown

# transformers 5 writes up to 50 GB a file: all of a Qwen3-Next in 4 bits, whose 512 experts have 300,000 tensors.
MAX_HEADER_BYTES = 100_000_000  # the format's own
MAX_HEADER_VALUES = 4_000_000  # some 500,000 tensors: 6 s and 600 MB
_INCOMPLETE = "not a complete safetensors file"
_PIECE_BYTES = 1 << 20
_SPAN_BYTES = 8 << 20  # rows of which a part is wanted are read together up to this size, and cut in memory

# safetensors' name of each dtype we read.
DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class Entry:
    """One tensor of the header. `start` is in bytes from the file's beginning."""

    shape: tuple[int, ...]
    dtype: str
    start: int


class Shard:
    """An open file. Methods raise CheckpointError, naming it, wherever it isn't what its header says."""

    def __init__(self, path: Path, shown_as: Path) -> None:
        self.path = shown_as
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise CheckpointError(f"{shown_as} can't be read: {error.strerror}") from error
        try:
            self.entries = self._header(path)
        except CheckpointError:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def read(self, name: str, index: Index) -> torch.Tensor:
        """Reads an owned copy of a slice. Raises CheckpointError also for a number that isn't finite."""
        entry = self.entries[name]
        where = f"{self.path}: tensor {shown(name)}"
        if entry.dtype not in _DTYPES:
            raise CheckpointError(f"{where} has dtype {entry.dtype}: expected one of {', '.join(_DTYPES)}")
        ranges = _ranges(entry.shape, index, where)
        dtype = _DTYPES[entry.dtype]
        out = torch.empty([len(r) for r in ranges], dtype=dtype, device="cpu")
        if out.numel():
            self._fill(out, entry, ranges, where)
            require_finite(out, where, ranges)
        return out[tuple(0 if isinstance(item, int) else slice(None) for item in index)]

    def sample(self, name: str, size: int) -> bytes:
        """Reads the first bytes of a tensor, at most `size`."""
        entry = self.entries[name]
        itemsize = _DTYPES[entry.dtype].itemsize if entry.dtype in _DTYPES else 1
        buffer = bytearray(min(size, prod(entry.shape) * itemsize))
        self._pread(memoryview(buffer), entry.start, f"{self.path}: tensor {shown(name)}")
        return bytes(buffer)

    def _fill(self, out: torch.Tensor, entry: Entry, ranges: list[range], where: str) -> None:
        """Reads `ranges` of the tensor into `out`, in as few reads as its order allows."""
        # Bytes from one entry of each dimension to the next.
        strides = [prod(entry.shape[dim + 1 :]) * out.element_size() for dim in range(len(ranges))]
        whole = [len(r) == size for r, size in zip(ranges, entry.shape, strict=True)]

        def fill(part: torch.Tensor, dim: int, at: int) -> None:
            """Reads `part`, [rows of `dim`, ...], whose first row begins at byte `at`."""
            if all(whole[dim + 1 :]):
                self._pread(_bytes(part), at, where)
            elif strides[dim] > _SPAN_BYTES:
                inner = ranges[dim + 1].start * strides[dim + 1]
                for row in range(len(part)):
                    fill(part[row], dim + 1, at + row * strides[dim] + inner)
            else:
                rows, taken = max(1, _SPAN_BYTES // strides[dim]), [slice(r.start, r.stop) for r in ranges[dim + 1 :]]
                for row in range(0, len(part), rows):
                    piece = part[row : row + rows]
                    span = torch.empty([len(piece), *entry.shape[dim + 1 :]], dtype=out.dtype, device="cpu")
                    self._pread(_bytes(span), at + row * strides[dim], where)
                    piece.copy_(span[(slice(None), *taken)])

        fill(out, 0, entry.start + (ranges[0].start * strides[0] if ranges else 0))

    def _pread(self, into: memoryview, at: int, where: str) -> None:
        done = 0
        while done < len(into):
            try:
                count = os.preadv(self._file.fileno(), [into[done : done + (1 << 30)]], at + done)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{where} can't be read: {error}") from error
            if count == 0:
                raise CheckpointError(f"{where} can't be read: the file ends at byte {at + done}, it was cut off")
            done += count

    def _header(self, path: Path) -> dict[str, Entry]:
        size = os.fstat(self._file.fileno()).st_size
        if size < 8:
            raise CheckpointError(f"{self.path}: {_INCOMPLETE}: it has {size} bytes")
        start = bytes(self._bytes_at(0, 8))
        if start == b"version ":  # https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
            raise CheckpointError(
                f"{self.path}: a Git LFS pointer: `git lfs pull` in its folder brings the file itself"
            )
        length = int.from_bytes(start, "little")
        if length > size - 8:
            raise CheckpointError(f"{self.path}: {_INCOMPLETE}: a header of {length} bytes in a file of {size}")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(f"{self.path}: a header of {length} bytes: expected at most {MAX_HEADER_BYTES}")
        fields = parse_object(self._bytes_at(8, length), f"{self.path}: header", MAX_HEADER_VALUES)
        try:
            with safe_open(str(path), framework="pt", device="cpu"):
                pass
        except (SafetensorError, OSError) as error:
            # The library repeats what it can't read, of any length.
            raise CheckpointError(f"{self.path}: {_INCOMPLETE}: {shown(str(error))}") from error
        return self._entries(fields, size, 8 + length)

    def _bytes_at(self, start: int, size: int) -> bytearray:
        raw = bytearray(size)
        self._pread(memoryview(raw), start, str(self.path))
        return raw

    def _entries(self, fields: dict[str, Any], size: int, data: int) -> dict[str, Entry]:
        """Returns the tensors that a header names, in a file of `size` bytes whose tensors begin at `data`."""
        found: dict[str, Entry] = {}
        for name, said in fields.items():
            if name == "__metadata__":
                continue
            match said:
                case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(end)]} if all(
                    type(n) is int and n >= 0 for n in shape
                ):
                    found[name] = Entry(tuple(shape), dtype, data + start)
                case _:
                    raise CheckpointError(f"{self.path}: header says {shown(said)} of tensor {shown(name)}")
            if not 0 <= start <= end <= size - data:
                raise CheckpointError(f"{self.path}: tensor {shown(name)} lies outside of the file")
            if dtype in _DTYPES and end - start != prod(shape) * _DTYPES[dtype].itemsize:
                raise CheckpointError(
                    f"{self.path}: tensor {shown(name)} has {end - start} bytes for {shown(shape)} {dtype}"
                )
        return found


def require_finite(tensor: torch.Tensor, where: str, ranges: list[range] | None = None) -> None:
    """Raises CheckpointError naming the first number that isn't finite, and its place in the tensor.

    `ranges` say which part of each dimension `tensor` is; None is all of it. Floats take one pass over memory, FP8,
    which has no infinity, takes two, codes and integers none.
    """
    ranges = [range(size) for size in tensor.shape] if ranges is None else ranges
    flat = tensor.detach().flatten()
    piece = _PIECE_BYTES // tensor.element_size()
    for start in range(0, flat.numel(), piece):
        part = flat[start : start + piece]
        if not _finite(part):
            bad = int((~torch.isfinite(part.float())).nonzero()[0])
            offsets = torch.unravel_index(torch.tensor(start + bad, device="cpu"), [len(r) for r in ranges])
            place = [r.start + int(offset) for r, offset in zip(ranges, offsets, strict=True)]
            raise CheckpointError(f"{where} holds {part[bad].float().item()} at {place}: expected finite numbers")


def _finite(part: torch.Tensor) -> bool:
    if part.dtype == torch.float8_e4m3fn:
        return int(part.view(torch.int8).max()) != 0x7F and int(part.view(torch.uint8).max()) != 0xFF  # its two NaNs
    if not part.dtype.is_floating_point or part.dtype == torch.float8_e8m0fnu:  # scales have a check of their own
        return True
    low, high = torch.aminmax(part)  # both are NaN if one is
    return bool(torch.isfinite(low) and torch.isfinite(high))


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]


def _ranges(shape: tuple[int, ...], index: Index, where: str) -> list[range]:
    """Returns the part of each dimension that an index takes."""
    given = [*index, *[slice(None)] * (len(shape) - len(index))]
    refused = f"{where} {shown(list(shape))} can't be read at {index}"
    if len(given) != len(shape):
        raise CheckpointError(f"{refused}: too many indices")
    ranges: list[range] = []
    for item, size in zip(given, shape, strict=True):
        if isinstance(item, int):
            if not 0 <= item < size:
                raise CheckpointError(f"{refused}: {item} is out of range")
            ranges.append(range(item, item + 1))
        else:
            start, stop, step = item.indices(size)
            if step != 1:
                raise CheckpointError(f"{refused}: expected steps of 1")
            ranges.append(range(start, max(start, stop)))
    return ranges
