"""Safetensors checkpoints: one file, or shards with an index. Reads the bytes of the slices asked for, and no others.

Nothing from a checkpoint is executed: no pickle, no `auto_map` code. Format and index layout:
https://huggingface.co/docs/safetensors and `model.safetensors.index.json` as `save_pretrained` writes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import EllipsisType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from eprt.errors import CheckpointError, EprtError, WorldMismatch
from eprt.world.header import Header, exchange

if TYPE_CHECKING:
    from eprt.world import World

CONFIG, QUANT_CONFIG = "config.json", "hf_quant_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_CONFIG_BYTES = 16 << 20
MAX_INDEX_BYTES = 256 << 20
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

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

Index = tuple[int | slice | EllipsisType, ...]


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is and what its header says: shard file, shape, dtype by safetensors' name (`BF16`, `U8`)."""

    file: str
    shape: tuple[int, ...]
    dtype: str


class Checkpoint:
    """A checkpoint directory. Opening it reads config.json, the index and every shard's header, and no tensor.

    Args:
        directory: holds config.json and safetensors files: a plain folder, or a snapshot of the Hugging Face cache
            (whose entries link into its `blobs` folder).

    Attributes:
        config: config.json as a dict; where only hf_quant_config.json describes the quantisation (older ModelOpt
            exports), it is added as `quantization_config`.
        manifest: name -> TensorInfo of every tensor.
        bytes_read: bytes of tensor data copied out so far.

    Raises:
        CheckpointError: naming the file and, where there is one, the tensor.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.config = read_config(self.directory)
        self.bytes_read = 0
        self._handles: dict[str, Any] = {}
        self._touched: set[str] = set()
        try:
            self.manifest = self._read_headers()
        except CheckpointError:
            self.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __contains__(self, name: str) -> bool:
        return name in self.manifest

    def close(self) -> None:
        """Unmap the files. Tensors already read are copies and stay valid."""
        while self._handles:
            _, handle = self._handles.popitem()
            handle.__exit__(None, None, None)

    def forget(self, prefix: str) -> None:
        """What was read so far won't be read again (a module of the model, by its dotted prefix). The files are mapped
        anew, so that their pages no longer count as this process's memory."""
        for file in self._touched:
            self._handles.pop(file).__exit__(None, None, None)
            self._handles[file] = self._open(file)
        self._touched.clear()

    @property
    def fingerprint(self) -> int:
        """63-bit hash of the config and of all names, shapes and dtypes, to be compared between ranks."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> int:
        rows = sorted((name, info.shape, info.dtype) for name, info in self.manifest.items())
        return hash63(json.dumps(self.config, sort_keys=True).encode(), repr(rows).encode())

    def where(self, name: str) -> str:
        """File and name, as every message about that tensor begins. Raises CheckpointError if there is no such one."""
        return f"{self.directory / self.manifest[self.first(name)].file}: tensor {name!r}"

    def first(self, *names: str) -> str:
        """The first of `names` that the checkpoint holds. Raises CheckpointError if it holds none of them."""
        for name in names:
            if name in self.manifest:
                return name
        raise CheckpointError(f"{self.directory}: tensor {' or '.join(map(repr, names))} is missing")

    def read(
        self,
        name: str,
        index: Index = (),
        *,
        shape: tuple[int, ...] | None = None,
        dtypes: Iterable[torch.dtype] = (),
    ) -> torch.Tensor:
        """A slice of a tensor, as an owned CPU copy. Only the slice's bytes are read.

        Args:
            name: the tensor.
            index: ints and unit-step slices; () is the whole tensor.
            shape: of the whole tensor, if it must be checked.
            dtypes: those allowed, if they must be checked.

        Raises:
            CheckpointError: no such tensor, or its shape or dtype isn't as expected.
        """
        where = self.where(name)
        info = self.manifest[name]
        allowed = [DTYPE_NAMES[dtype] for dtype in dtypes]
        if allowed and info.dtype not in allowed:
            raise CheckpointError(f"{where} has dtype {info.dtype}: expected {' or '.join(allowed)}")
        if shape is not None and info.shape != shape:
            raise CheckpointError(f"{where} has shape {info.shape}: expected {shape}")
        self._touched.add(info.file)
        try:
            # The library maps the file, so a slice is a view: pages outside it are never touched.
            view: torch.Tensor = self._handles[info.file].get_slice(name)[index or (...,)]
        except (SafetensorError, IndexError) as error:
            raise CheckpointError(f"{where} {list(info.shape)} can't be read at {index}: {error}") from error
        self.bytes_read += view.numel() * view.element_size()
        return view.clone(memory_format=torch.contiguous_format)

    def _read_headers(self) -> dict[str, TensorInfo]:
        weight_map = self._weight_map()
        manifest: dict[str, TensorInfo] = {}
        for file in sorted(set(weight_map.values())) if weight_map else [SINGLE]:
            handle = self._handles[file] = self._open(file)
            for name in handle.keys():  # noqa: SIM118 (not a dict)
                if name in manifest:
                    raise CheckpointError(
                        f"{self.directory}: tensor {name!r} is in {manifest[name].file} and in {file}: expected it once"
                    )
                header = handle.get_slice(name)
                manifest[name] = TensorInfo(file, tuple(header.get_shape()), str(header.get_dtype()))
        for name, file in weight_map.items():
            if name not in manifest or manifest[name].file != file:
                raise CheckpointError(
                    f"{self.directory / INDEX}: tensor {name!r} is said to be in {file}, which lacks it"
                )
        return manifest

    def _weight_map(self) -> dict[str, str]:
        """Tensor -> file by the index; empty if the checkpoint is one file."""
        if (self.directory / SINGLE).exists():
            return {}
        path = self.directory / INDEX
        if not path.exists():
            pickles = sorted(p.name for pattern in _PICKLES for p in self.directory.glob(pattern))
            why = (
                f"found {pickles[0]}, a pickle, which can run code when it is read; convert it to" if pickles else "no"
            )
            raise CheckpointError(f"{self.directory}: {why} safetensors (expected {SINGLE} or {INDEX})")
        weight_map = _read_json(resolve_inside(self.directory, INDEX), MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path}: expected a non-empty object 'weight_map'")
        for name, file in weight_map.items():
            if not isinstance(file, str):
                raise CheckpointError(f"{path}: tensor {name!r} is mapped to {file!r}: expected a file name")
        return weight_map

    def _open(self, file: str) -> Any:
        path = resolve_inside(self.directory, file)
        if not file.endswith(".safetensors"):
            raise CheckpointError(f"{self.directory / file}: expected a .safetensors file")
        try:
            return safe_open(str(path), framework="pt", device="cpu").__enter__()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.directory / file}: not a complete safetensors file: {error}") from error


def read_config(path: str | Path) -> dict[str, Any]:
    """config.json of a directory, or that file itself, with hf_quant_config.json merged in. Raises CheckpointError."""
    path = Path(path)
    directory, name = (path, CONFIG) if path.is_dir() else (path.parent, path.name)
    config = _read_json(resolve_inside(directory, name), MAX_CONFIG_BYTES)
    if "quantization_config" not in config and (directory / QUANT_CONFIG).exists():
        extra = _read_json(resolve_inside(directory, QUANT_CONFIG), MAX_CONFIG_BYTES).get("quantization")
        if not isinstance(extra, dict):
            raise CheckpointError(f"{directory / QUANT_CONFIG}: expected an object 'quantization'")
        config["quantization_config"] = {"quant_method": "modelopt", **extra}
    return config


def resolve_inside(directory: Path, name: str) -> Path:
    """The real path of a file that belongs to the checkpoint.

    It lies in the directory itself or, for a snapshot of the Hugging Face cache (`<model>/snapshots/<revision>`), in
    that model's `blobs`. Raises CheckpointError for any other place, and if there is no such file.
    """
    if Path(name).name != name or name in ("", ".", ".."):
        raise CheckpointError(f"{directory}: entry {name!r} leaves the checkpoint's folder; expected a bare file name")
    root = directory.resolve()
    allowed = [root] + ([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])
    try:
        path = (root / name).resolve()
        is_file = path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, a NUL, a loop of links (until 3.13)
        raise CheckpointError(f"{directory}: entry {name!r} is no usable file name: {error}") from error
    if path.parent not in allowed:
        raise CheckpointError(f"{directory / name}: links to {path}, outside the checkpoint's folder")
    if not is_file:
        raise CheckpointError(f"{directory / name}: no such file")
    return path


def hash63(*chunks: bytes) -> int:
    """63-bit hash for a header's fingerprint."""
    digest = hashlib.sha256(b"\0".join(chunks)).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _read_json(path: Path, limit: int) -> dict[str, Any]:
    size = path.stat().st_size
    if size > limit:
        raise CheckpointError(f"{path}: {size} bytes, over the limit of {limit}; is it really a JSON description?")
    try:
        parsed = json.loads(path.read_bytes(), object_pairs_hook=lambda pairs: _unique(path, pairs))
    except (ValueError, RecursionError, OSError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path}: found a JSON {type(parsed).__name__}: expected an object")
    return parsed


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(f"{path}: key {twice!r} appears twice: expected it once")
    return found


class Loaded(Protocol):
    """What ranks load together: carries a hash of all that must be the same on every rank."""

    @property
    def fingerprint(self) -> int: ...


T = TypeVar("T", bound=Loaded)


def load_on_all_ranks(world: World, load: Callable[[], T], layer: int = -1) -> T:
    """Run `load` on every rank and let all ranks know how it went. Collective.

    Args:
        world: the ranks.
        load: reads this rank's share, e.g. `lambda: load_layer(directory, 3, world.parallel, world.rank)`.
        layer: for messages.

    Returns:
        this rank's result; nothing is returned anywhere unless every rank succeeded.

    Raises:
        EprtError: the lowest failing rank's error, the same on every rank.
        WorldMismatch: the ranks read different checkpoints (or revisions of one).
    """
    try:
        loaded = load()
    except EprtError as error:
        exchange(world, Header("load", layer, 0), error)  # raises on every rank, here included
        raise
    try:
        exchange(world, Header("load", layer, 0, fingerprint=loaded.fingerprint))
    except WorldMismatch as mismatch:
        remedy = "fingerprint is a hash of config.json, tensor names and router: give every rank the same revision"
        mismatch.args = (f"{mismatch}\n{remedy}",)
        raise
    return loaded
