"""Breaks a checkpoint's files, by dice: values and text of its JSON, headers, payloads, lengths, whole files. What is
made of them has to be right, or a typed error."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from eprt.conformance.tiny_model import write_tiny_checkpoint
from eprt.errors import EprtError
from eprt.models.checkpoint import CONFIG, INDEX

LAYER = "model.layers.0.mlp"


def small_checkpoint(folder: Path) -> Path:
    """Writes a gpt-oss of one layer and four experts."""
    return write_tiny_checkpoint(folder, num_layers=1, num_experts=4, top_k=2, hidden_size=32, intermediate_size=32)


def change_config(folder: Path, **fields: object) -> Path:
    (folder / CONFIG).write_text(json.dumps(json.loads((folder / CONFIG).read_text()) | fields))
    return folder


def shard_of(folder: Path, name: str) -> Path:
    """Returns the file that holds a tensor."""
    return next(path for path in sorted(folder.glob("*.safetensors")) if name in load_file(path))


def set_number(folder: Path, name: str, place: Sequence[int], value: float, dtype: torch.dtype | None = None) -> Path:
    """Overwrites one number of a tensor, which is brought to `dtype` before. Returns its file."""
    tensors = load_file(path := shard_of(folder, name))
    tensors[name] = tensors[name].to(dtype)
    tensors[name][tuple(place)] = value
    save_file(tensors, path)
    return path


def header_of(path: Path) -> tuple[dict, bytes]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def with_header(path: Path, header: str, data: bytes) -> None:
    encoded = header.encode("utf-8", errors="surrogatepass")
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


HOSTILE = [
    None, True, -1, 0, 1, 10**18, 10**400, 1e308, float("nan"), float("inf"), "", "\x1b[31m", "x" * 5000, [], {}, [[]],
    {"a": 1}, ["*" * 50] * 3, "../../etc/passwd", "F32", [2**62, 2**62], -(10**30), "é" * 300,
]  # fmt: skip


def mutate(folder: Path, dice: random.Random) -> None:
    """One thing, or a few, in one of the files."""
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        with suppress(FileNotFoundError, IndexError, shutil.SameFileError):  # an earlier mutation removed it
            dice.choice((_json_value, _json_text, _header_value, _payload, _cut, _extra))(folder, dice)


def outcome(folder: Path, load: Callable[[], None]) -> str:
    """ "right" if `load` finds nothing wrong, else the typed error that it raises, which names the folder's file."""
    said = ""
    try:
        load()
    except EprtError as error:
        said = str(error)
    assert not said or (str(folder) in said and len(said) < 5000), said
    return f"refused: {said}" if said else "right"


def require_all_told(whole: Path, target: Path, seeds: Sequence[int], load: Callable[[Path, int], None]) -> None:
    """Breaks a copy of a checkpoint for each seed. `load` is given the copy, and checks whatever it can load."""
    refused, started = 0, time.process_time()
    for seed in seeds:
        folder = shutil.copytree(whole, target / str(seed))
        mutate(folder, random.Random(seed))
        refused += outcome(folder, lambda folder=folder, seed=seed: load(folder, seed)) != "right"
        shutil.rmtree(folder)
    assert len(seeds) / 5 < refused < len(seeds), "the mutations no longer do what they should"
    assert time.process_time() - started < 60


def mutate_config(folder: Path, dice: random.Random) -> None:
    """A few values of config.json, or of its text."""
    for _ in range(dice.choice((1, 1, 2, 4))):
        if dice.random() < 0.75:
            _json_value(folder, dice, (CONFIG,))
        else:
            _json_text(folder, dice, (CONFIG,))


def _json_value(folder: Path, dice: random.Random, names: Sequence[str] = (CONFIG, CONFIG, INDEX)) -> None:
    path = folder / dice.choice(names)
    try:
        value = json.loads(path.read_text(errors="replace"))
    except ValueError:
        return
    if isinstance(value, dict):
        _edit(value, dice)
        path.write_text(json.dumps(value))


def _edit(value: dict, dice: random.Random) -> None:
    key = dice.choice([*value, "n_shared_experts"])
    inner = value.get(key)
    if isinstance(inner, dict) and inner and dice.random() < 0.5:
        _edit(inner, dice)
    elif dice.random() < 0.3:
        value.pop(key, None)
    else:
        value[key] = dice.choice(HOSTILE)


def _json_text(folder: Path, dice: random.Random, names: Sequence[str] = (CONFIG, INDEX)) -> None:
    path = folder / dice.choice(names)
    text = bytearray(path.read_bytes())
    for _ in range(dice.randint(1, 3)):
        if text:
            text[dice.randrange(len(text))] = dice.choice(b'{}[]",:0e9\x00\xff\\-')
    path.write_bytes(bytes(text))


def _header_value(folder: Path, dice: random.Random) -> None:
    path = dice.choice(sorted(folder.glob("*.safetensors")))
    try:
        header, data = header_of(path)
    except (ValueError, struct.error):
        return
    name = dice.choice(list(header))
    action = dice.randrange(4)
    if action == 0 and isinstance(header[name], dict):
        header[name][dice.choice(["dtype", "shape", "data_offsets"])] = dice.choice(HOSTILE)
    elif action == 1:
        header[dice.choice(["", "model.x", f"{LAYER}.shared_experts.up_proj.weight"])] = header.pop(name)
    elif action == 2:
        header.pop(name)
    text = json.dumps(header)
    if action == 3:
        text = text[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"
    with_header(path, text, data)


def _payload(folder: Path, dice: random.Random) -> None:
    path = dice.choice(sorted(folder.glob("*.safetensors")))
    raw = bytearray(path.read_bytes())
    for _ in range(dice.randint(1, 8)):
        if raw:
            raw[dice.randrange(len(raw))] = dice.choice((0, 0x7F, 0x80, 0xFF, dice.randrange(256)))
    path.write_bytes(bytes(raw))


def _cut(folder: Path, dice: random.Random) -> None:
    path = dice.choice(sorted(folder.iterdir()))
    raw = path.read_bytes()
    path.write_bytes(raw[: dice.randrange(len(raw) + 1)] + os.urandom(dice.choice((0, 0, 1, 100))))


def _extra(folder: Path, dice: random.Random) -> None:
    path = dice.choice(sorted(folder.iterdir()))
    if dice.random() < 0.5:
        path.unlink()
    else:
        shutil.copy(path, folder / dice.choice(("model.safetensors", "model.bin", "hf_quant_config.json")))
