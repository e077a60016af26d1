"""Safetensors checkpoints: one file, or shards with an index. Only the bytes of the requested slices are read.

Nothing from a checkpoint is executed: no pickle, no `auto_map` code. Format and index layout:
https://huggingface.co/docs/safetensors and `model.safetensors.index.json` as `save_pretrained` writes it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from eprt.errors import CheckpointError, UsageError, WorldMismatch
from eprt.json_files import read_object, shown
from eprt.kinds import require_kinds
from eprt.models.hf_config import HfConfig
from eprt.models.shards import DTYPE_NAMES, Index, Shard
from eprt.world.agree import Header, exchange, shared_errors

if TYPE_CHECKING:
    from eprt.world import World

CONFIG, QUANT_CONFIG = "config.json", "hf_quant_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_CONFIG_BYTES = 4 << 20  # the largest of published ones, with names of all quantised modules, has 2
MAX_INDEX_BYTES = 64 << 20
MAX_NAMES = 1_000_000  # in all files
logger = logging.getLogger("eprt")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its header describes it: shard file, shape, and the dtype it is read in by safetensors' name
    (`BF16`, which float16 becomes unless it scales packed weights; `U8`)."""

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
            exports), it is added as `quantization_config`, and float32 as `dtype` where it names none and the files
            hold nothing else.
        manifest: name -> TensorInfo of every tensor.
        bytes_read: bytes of tensor data copied out so far.
        touched: names of the tensors that were read.

    Raises:
        CheckpointError: naming the file and, where there is one, the tensor.
    """

    def __init__(self, directory: str | Path) -> None:
        require_kinds(Checkpoint.__init__, locals())
        self.directory = Path(directory)
        if os.path.exists(directory) and not os.path.isdir(directory):
            raise CheckpointError(f"{directory}: not a folder: expected a checkpoint's, which holds {CONFIG}")
        self.config = read_config(self.directory)
        self.bytes_read = 0
        self.touched: set[str] = set()
        self._shards: dict[str, Shard] = {}
        try:
            self.manifest = self._read_headers()
        except CheckpointError:
            self.close()
            raise
        if not _names_dtype(self.config) and {info.dtype for info in self.manifest.values()} == {"F32"}:
            self.config["dtype"] = "float32"

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __contains__(self, name: str) -> bool:
        return name in self.manifest

    def close(self) -> None:
        """Closes the files. Tensors already read are copies and stay valid."""
        while self._shards:
            self._shards.popitem()[1].close()

    def forget(self, prefix: str) -> None:
        """Frees tensors of a module that won't be read again. Files need nothing: they are read, not mapped."""

    @property
    def fingerprint(self) -> int:
        """A 63-bit hash of the config and of all names, shapes and dtypes, to be compared between ranks."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> int:
        rows = sorted((name, info.shape, info.dtype) for name, info in self.manifest.items())
        return hash63(json.dumps(self.config, sort_keys=True).encode(), repr(rows).encode())

    def where(self, name: str) -> str:
        """Returns file and name, for the head of a message about a tensor. Raises CheckpointError if there is none."""
        return f"{self.directory / self.manifest[self.first(name)].file}: tensor {shown(name)}"

    def first(self, *names: str) -> str:
        """Returns the first of `names` that the checkpoint holds. Raises CheckpointError if it holds none of them."""
        for name in names:
            if name in self.manifest:
                return name
        raise CheckpointError(f"{self.directory}: tensor {' or '.join(map(shown, names))} is missing")

    def read(
        self,
        name: str,
        index: Index = (),
        *,
        shape: tuple[int, ...] | None = None,
        dtypes: Iterable[torch.dtype] = (),
        half: torch.dtype = torch.bfloat16,
    ) -> torch.Tensor:
        """Reads a slice of a tensor into an owned CPU copy: ints and unit-step slices, () is the whole tensor. Float16
        becomes `half`, but in scales of packed weights.

        Raises CheckpointError: no such tensor, another shape or dtype than expected for the whole of it, NaN or
        infinity, or a file that was cut off.
        """
        self.require(name, shape=shape, dtypes=dtypes)
        found = self._slice(name, index)
        self.touched.add(name)
        self.bytes_read += found.numel() * found.element_size()
        return found.to(half) if found.dtype == torch.float16 and not _is_scale(name) else found

    def require(
        self, name: str, *, shape: tuple[int, ...] | None = None, dtypes: Iterable[torch.dtype] = ()
    ) -> TensorInfo:
        """Returns what the header says of a tensor. Raises CheckpointError: there is none, or another shape or dtype
        than expected."""
        where = self.where(name)
        info = self.manifest[name]
        allowed = [DTYPE_NAMES[dtype] for dtype in dtypes]
        if allowed and info.dtype not in allowed:
            raise CheckpointError(f"{where} has dtype {info.dtype}: expected {' or '.join(allowed)}")
        if shape is not None and info.shape != shape:
            raise CheckpointError(f"{where} has shape {shown(info.shape)}: expected {shape}")
        return info

    def _slice(self, name: str, index: Index) -> torch.Tensor:
        return self._shard(name).read(name, index)

    def _shard(self, name: str) -> Shard:
        if (shard := self._shards.get(self.manifest[name].file)) is None:
            raise UsageError(f"{self.directory}: the checkpoint is closed: read it before, or open another")
        return shard

    def sample(self, name: str, size: int = 64) -> bytes:
        """Reads the first bytes of a tensor, at most `size`. Raises CheckpointError."""
        self.where(name)
        return self._shard(name).sample(name, size)

    def _read_headers(self) -> dict[str, TensorInfo]:
        weight_map = self._weight_map()
        manifest: dict[str, TensorInfo] = {}
        for file in sorted(set(weight_map.values())) if weight_map else [SINGLE]:
            shard = self._shards[file] = self._open(file)
            for name, entry in shard.entries.items():
                if name in manifest:
                    both = f"{manifest[name].file} and in {file}"
                    raise CheckpointError(f"{self.directory}: tensor {shown(name)} is in {both}: expected it once")
                dtype = "BF16" if entry.dtype == "F16" and not _is_scale(name) else entry.dtype
                manifest[name] = TensorInfo(file, entry.shape, dtype)
                if dtype != entry.dtype:
                    _say_rounded(self.directory)
            if len(manifest) > MAX_NAMES:
                raise CheckpointError(f"{self.directory}: over {MAX_NAMES} tensors: expected at most so many")
        for name, file in weight_map.items():
            if name not in manifest or manifest[name].file != file:
                raise CheckpointError(
                    f"{self.directory / INDEX}: tensor {shown(name)} is said to be in {file}, which lacks it"
                )
        return manifest

    def _weight_map(self) -> dict[str, str]:
        """Returns tensor -> file by the index; empty if the checkpoint is one file."""
        if (self.directory / SINGLE).exists():
            return {}
        path = self.directory / INDEX
        if not path.exists():
            pickles = sorted(p.name for pattern in _PICKLES for p in self.directory.glob(pattern))
            why = (
                f"found {pickles[0]}, a pickle, which can run code when it is read; convert it to" if pickles else "no"
            )
            raise CheckpointError(f"{self.directory}: {why} safetensors (expected {SINGLE} or {INDEX})")
        weight_map = read_object(resolve_inside(self.directory, INDEX), MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path}: expected a non-empty object 'weight_map'")
        for name, file in weight_map.items():
            if not isinstance(file, str):
                raise CheckpointError(f"{path}: tensor {shown(name)} is mapped to {shown(file)}: expected a file name")
        return weight_map

    def _open(self, file: str) -> Shard:
        path = resolve_inside(self.directory, file)
        if not file.endswith(".safetensors"):
            raise CheckpointError(f"{self.directory / file}: expected a .safetensors file")
        return Shard(path, self.directory / file)


def _names_dtype(config: HfConfig) -> bool:
    nested = config.get("text_config")
    sections = [config, nested] if isinstance(nested, dict) else [config]
    return any(section.get(name) for section in sections for name in ("dtype", "torch_dtype"))


def _is_scale(name: str) -> bool:
    """Tells by its name whether a tensor scales packed weights: it keeps its precision."""
    return "scale" in name.rpartition(".")[2]


@cache
def _say_rounded(directory: Path) -> None:
    """Warns once for each directory."""
    logger.warning("%s: weights in float16 are rounded to bfloat16, in which executors compute", directory)


def read_config(path: str | Path) -> HfConfig:
    """Reads config.json (or its directory), with hf_quant_config.json merged in. Raises CheckpointError."""
    path = Path(path)
    try:
        directory, name = (path, CONFIG) if path.is_dir() else (path.parent, path.name)
    except OSError as error:  # a name too long, a folder around it that this user may not enter
        raise CheckpointError(f"{shown(str(path))} can't be read: {error.strerror}") from error
    if not os.path.exists(path):  # Path.exists() may raise
        raise CheckpointError(f"{path}: no such file or folder; `hf download` brings a model of the hub")
    config = HfConfig(read_object(resolve_inside(directory, name), MAX_CONFIG_BYTES), str(directory / name))
    if config.get("quantization_config") is None and isinstance(config.get("compression_config"), dict):
        config["quantization_config"] = config["compression_config"]  # as compressed-tensors' first writers called it
    if config.get("quantization_config") is None and (directory / QUANT_CONFIG).exists():
        extra = read_object(resolve_inside(directory, QUANT_CONFIG), MAX_CONFIG_BYTES).get("quantization")
        if not isinstance(extra, dict):
            raise CheckpointError(f"{directory / QUANT_CONFIG}: expected an object 'quantization'")
        config["quantization_config"] = {"quant_method": "modelopt", **extra}
    return config


def resolve_inside(directory: Path, name: str) -> Path:
    """Returns the real path of a file of the checkpoint. Raises CheckpointError if it is missing or lies elsewhere.

    Allowed are the directory itself and, for a snapshot of the Hugging Face cache (`<model>/snapshots/<revision>`),
    that model's `blobs`.
    """
    if Path(name).name != name or name in ("", ".", ".."):
        raise CheckpointError(
            f"{directory}: entry {shown(name)} leaves the checkpoint's folder; expected a bare file name"
        )
    root = directory.resolve()
    allowed = [root] + ([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])
    try:
        path = (root / name).resolve()
        is_file = path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, a NUL, a loop of links (until 3.13)
        why = getattr(error, "strerror", None) or error  # without the name, which may be long
        raise CheckpointError(f"{directory}: entry {shown(name)} is no usable file name: {why}") from error
    if path.parent not in allowed:
        raise CheckpointError(f"{directory / name}: links to {path}, outside the checkpoint's folder")
    if not is_file:
        raise CheckpointError(f"{directory / name}: {'not a regular file' if os.path.exists(path) else 'no such file'}")
    return path


def hash63(*chunks: bytes) -> int:
    """Returns a 63-bit hash for a header's fingerprint."""
    digest = hashlib.sha256(b"\0".join(chunks)).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class Fingerprinted(Protocol):
    """Something that all ranks load together. `fingerprint` hashes what must be the same on every rank."""

    @property
    def fingerprint(self) -> int: ...


T = TypeVar("T", bound=Fingerprinted)


def load_on_all_ranks(world: World, load: Callable[[], T], layer: int = -1) -> T:
    """Runs `load` on every rank, e.g. `lambda: load_layer(directory, 3, world.parallel, world.rank)`. Collective.

    It returns this rank's result if every rank succeeded. `layer` is for messages.

    Raises:
        EprtError: the lowest failing rank's error, the same on every rank.
        WorldMismatch: the ranks read different checkpoints (or revisions of one).
    """
    with shared_errors(world, Header("load", layer, 0)):
        loaded = load()
    try:
        exchange(world, Header("load", layer, 0, fingerprint=loaded.fingerprint))
    except WorldMismatch as mismatch:
        remedy = "fingerprint is a hash of config.json, tensor names and router: give every rank the same revision"
        mismatch.args = (f"{mismatch}\n{remedy}",)
        raise
    return loaded
