"""Every way a checkpoint can be wrong has a test; so has the claim that only the asked-for bytes are read."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.builders import NOTHING
from support.cases.broken_files import set_number
from support.jobs import checkpoint_jobs as jobs

from eprt.config import ParallelConfig
from eprt.conformance.tiny_model import write_tiny_checkpoint
from eprt.errors import CheckpointError, ConfigError, UsageError
from eprt.models import checkpoint as checkpoint_module
from eprt.models import load_layer
from eprt.models.checkpoint import CONFIG, INDEX, MAX_CONFIG_BYTES, QUANT_CONFIG, SINGLE, Checkpoint, read_config
from eprt.models.shards import Shard
from eprt.placement import ExpertPlacement

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SCALES = "model.layers.0.mlp.experts.down_proj_scales"  # of a tiny checkpoint


def write(directory, shards, index=None, config="{}"):
    """A checkpoint folder: {file: {name: tensor}}; `index` overrides the weight map."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).write_text(config)
    for file, tensors in shards.items():
        save_file(tensors, directory / file)
    if set(shards) != {SINGLE}:
        found = {name: file for file, tensors in shards.items() for name in tensors}
        (directory / INDEX).write_text(json.dumps({"weight_map": found if index is None else index}))
    return directory


@pytest.fixture
def folder(tmp_path):
    shards = {A: {"x": torch.arange(24).view(2, 3, 4)}, B: {"y": torch.ones(3, dtype=torch.bfloat16)}}
    return write(tmp_path / "model", shards)


def refuses(directory, *words):
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(directory).close()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    assert len(str(caught.value)) < 5000


class TestReading:
    def test_slices_are_exact_and_counted(self, folder):
        x = torch.arange(24).view(2, 3, 4)
        with Checkpoint(folder) as checkpoint:
            assert checkpoint.bytes_read == 0
            cut = checkpoint.read("x", (1, slice(0, 2), slice(1, 3)))
            assert torch.equal(cut, x[1, 0:2, 1:3])
            assert cut.is_contiguous()
            assert checkpoint.bytes_read == 4 * 8
            assert torch.equal(checkpoint.read("x"), x)
            assert checkpoint.bytes_read == 4 * 8 + 24 * 8
            assert torch.equal(checkpoint.read("x", (slice(1, 1),)), x[1:1])
            assert checkpoint.bytes_read == 4 * 8 + 24 * 8

    def test_it_is_read_to_the_host_whatever_device_is_torchs_default(self, folder):
        x = torch.arange(24).view(2, 3, 4)
        with Checkpoint(folder) as checkpoint, torch.device("meta"):
            whole, cut = checkpoint.read("x"), checkpoint.read("x", (slice(0, 2), slice(1, 3), slice(1, 3)))
        assert torch.equal(whole, x)
        assert torch.equal(cut, x[:, 1:3, 1:3])

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8, torch.int8])
    def test_packed_dtypes_keep_their_bytes(self, tmp_path, dtype):
        codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
        path = write(tmp_path / "m", {SINGLE: {"t": codes.view(dtype), "s": torch.tensor(2.0)}})
        with Checkpoint(path) as checkpoint:
            found = checkpoint.read("t", (slice(3, 5), slice(4, 8)), dtypes=(dtype,))
            assert torch.equal(found.view(torch.uint8), codes[3:5, 4:8])
            assert checkpoint.read("s").item() == 2.0

    def test_fingerprint_changes_with_names_shapes_dtypes_and_config(self, tmp_path):
        variants = [({"x": torch.ones(4)}, "{}"), ({"y": torch.ones(4)}, "{}"), ({"x": torch.ones(5)}, "{}")]
        variants += [({"x": torch.ones(4).int()}, "{}"), ({"x": torch.ones(4)}, '{"a": 1}')]
        found = []
        for number, (tensors, config) in enumerate(variants):
            with Checkpoint(write(tmp_path / str(number), {SINGLE: tensors}, config=config)) as checkpoint:
                found.append(checkpoint.fingerprint)
        assert len(set(found)) == len(variants)
        with Checkpoint(write(tmp_path / "again", {SINGLE: {"x": torch.ones(4)}})) as checkpoint:
            assert checkpoint.fingerprint == found[0]

    def test_names_are_hashed_once_for_all_layers(self, tmp_path, monkeypatch):
        """There may be 300,000 names."""
        hashed = []
        monkeypatch.setattr(checkpoint_module, "hash63", lambda *chunks: hashed.append(chunks) or 1)
        with Checkpoint(write_tiny_checkpoint(tmp_path / "m")) as checkpoint:
            assert {load_layer(checkpoint, layer).layer for layer in (0, 1)} == {0, 1}
        assert len(hashed) == 1

    def test_nothing_is_read_of_one_that_is_closed(self, folder):
        with Checkpoint(folder) as checkpoint:
            name = next(iter(checkpoint.manifest))
        for read in (checkpoint.read, checkpoint.sample):
            with pytest.raises(UsageError, match="the checkpoint is closed"):
                read(name)

    def test_hub_cache_snapshot(self, folder, tmp_path):
        """The Hugging Face cache keeps files in blobs/ and links to them from snapshots/<revision>/."""
        root = tmp_path / "models--a--b"
        (root / "blobs").mkdir(parents=True)
        snapshot = root / "snapshots" / "abc123"
        snapshot.mkdir(parents=True)
        for number, file in enumerate(sorted(folder.iterdir())):
            file.rename(root / "blobs" / str(number))
            (snapshot / file.name).symlink_to(f"../../blobs/{number}")
        with Checkpoint(snapshot) as checkpoint:
            assert checkpoint.read("y").sum() == 3

    def test_modelopt_config_beside_the_models(self, folder):
        quantization = {"quant_algo": "NVFP4", "group_size": 16}
        (folder / QUANT_CONFIG).write_text(json.dumps({"producer": {}, "quantization": quantization}))
        for said in ("{}", '{"quantization_config": null}'):
            (folder / CONFIG).write_text(said)
            assert read_config(folder)["quantization_config"] == {"quant_method": "modelopt", **quantization}
        (folder / CONFIG).write_text('{"quantization_config": {"quant_method": "fp8"}}')
        assert read_config(folder / CONFIG)["quantization_config"] == {"quant_method": "fp8"}


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("z", {}, ("'z' is missing",)),
        ("x", {"shape": (2, 3, 5)}, (A, "'x'", "(2, 3, 4)", "expected (2, 3, 5)")),
        ("y", {"dtypes": (torch.uint8, torch.int8)}, (B, "'y'", "has dtype BF16", "expected U8 or I8")),
        ("x", {"index": (5,)}, ("can't be read",)),
    ],
)
def test_a_tensor_that_is_not_as_expected_is_refused(folder, name, given, words):
    with Checkpoint(folder) as checkpoint, pytest.raises(CheckpointError) as caught:
        checkpoint.read(name, **given)
    assert all(word in str(caught.value) for word in words), caught.value


def _text(name, content):
    """A break that replaces a file's content."""
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def _resize(name, change):
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size + change)


def _index(weight_map):
    return _text(INDEX, json.dumps({"weight_map": weight_map}))


def _link_to_itself(folder):
    (folder / A).unlink()
    (folder / A).symlink_to(A)


def _pickles_only(name):
    def break_it(folder):
        for path in folder.iterdir():
            path.unlink()
        _text(CONFIG, "{}")(folder)
        _text(name, PICKLE)(folder)

    return break_it


def _pickle_in_the_index(folder):
    _text("pytorch_model.bin", PICKLE)(folder)
    _index({"x": "pytorch_model.bin"})(folder)


def _nothing(folder):
    for name in (A, B, INDEX):
        (folder / name).unlink()


_HEADER = json.dumps({"x": {"dtype": "X" * 9999, "shape": [1], "data_offsets": [0, 4]}}).encode()
LONG_DTYPE = len(_HEADER).to_bytes(8, "little") + _HEADER + bytes(4)
PICKLE, INCOMPLETE = b"\x80\x02}q\x00.", "not a complete safetensors file"
OUTSIDE = ("/etc/passwd", "../other.safetensors", "sub/a.safetensors", "..", "")
REFUSED = [  # what breaks the folder, what the error says
    (lambda folder: (folder / CONFIG).unlink(), CONFIG, "no such file"),
    (
        lambda folder: os.truncate(folder / CONFIG, MAX_CONFIG_BYTES + 1),
        *(CONFIG, f"{MAX_CONFIG_BYTES + 1} bytes", f"limit of {MAX_CONFIG_BYTES}"),
    ),
    *((_text(CONFIG, text), CONFIG, "not valid JSON") for text in ("{", "\x00", '{"a": }', b'{"a": "\xff\xfe"}')),
    (_text(CONFIG, "[1]"), CONFIG, "found a JSON list", "expected an object"),
    (_text(CONFIG, '{"hidden_size": 1, "hidden_size": 2}'), CONFIG, "'hidden_size' appears twice"),
    (_text(QUANT_CONFIG, "{}"), QUANT_CONFIG, "expected an object 'quantization'"),
    (lambda folder: (folder / B).unlink(), B, "no such file"),
    (_resize(B, -1), B, INCOMPLETE),
    (_resize(B, 1), B, INCOMPLETE),
    *((_text(A, content), A, INCOMPLETE) for content in (b"", PICKLE, b"PK\x03\x04" * 50, b"<html>" * 50)),
    (_text(A, b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"), A, "Git LFS", "git lfs pull"),
    (_text(A, (1 << 60).to_bytes(8, "little") + b"{}"), A, INCOMPLETE),  # a header larger than the file
    (_text(A, LONG_DTYPE), A, INCOMPLETE, "invalid JSON"),
    *((_pickles_only(f), f, "a pickle", "convert it to") for f in ("pytorch_model.bin", "model.pt", "model.pth")),
    (_nothing, SINGLE, INDEX),
    *((_index({"x": f"{entry}.safetensors"}), "no usable file name") for entry in ("a\0", "a" * 5000)),
    *((_index({"x": entry}), "leaves the checkpoint's folder") for entry in OUTSIDE),
    (_pickle_in_the_index, "pytorch_model.bin", "expected a .safetensors file"),
    (_link_to_itself, A),
    (_index({"x": A, "y": B, "z": B}), INDEX, "'z'", B, "which lacks it"),
    (_index({"x": B, "y": A}), "'x'", "which lacks it"),
    (_text(INDEX, f'{{"weight_map": {{"x": "{A}", "x": "{B}"}}}}'), INDEX, "'x' appears twice"),
    *((_text(INDEX, text), INDEX, "expected a") for text in ("{}", '{"weight_map": {}}', '{"weight_map": [1]}')),
    (_index({"x": 1}), INDEX, "expected a"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: "-".join(case[1:])[:60])
def test_what_is_wrong_is_refused_when_the_folder_is_opened(folder, case):
    break_it, *words = case
    break_it(folder)
    refuses(folder, *words)


class TestFolderRefused:
    def test_tensor_in_two_shards(self, tmp_path):
        both = {A: {"x": torch.ones(1)}, B: {"x": torch.ones(1), "y": torch.ones(1)}}
        refuses(write(tmp_path / "m", both, {"x": A, "y": B}), "'x'", A, B, "expected it once")

    @pytest.mark.parametrize("name", [A, CONFIG, INDEX])
    def test_link_to_the_outside(self, folder, tmp_path, name):
        (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)
        refuses(folder, name, "outside the checkpoint's folder")

    def test_a_path_that_the_system_refuses(self):
        refuses("a" * 5000, "can't be read: File name too long")
        refuses("/dev/null", "/dev/null: not a folder")
        with pytest.raises(CheckpointError, match="/dev/null: not a regular file"):
            read_config("/dev/null")
        refuses("openai/gpt-oss-20b", "openai/gpt-oss-20b: no such file or folder; `hf download`")
        with pytest.raises(CheckpointError, match="can't be read: No such file"):
            Shard(Path("gone"), Path("gone"))

    def test_blobs_of_another_model(self, folder, tmp_path):
        """Only the snapshot's own blobs are its own."""
        other = tmp_path / "other" / "blobs"
        other.mkdir(parents=True)
        snapshot = tmp_path / "mine" / "snapshots" / "abc"
        shutil.copytree(folder, snapshot)
        (snapshot / A).rename(other / "0")
        (snapshot / A).symlink_to(other / "0")
        refuses(snapshot, A, "outside the checkpoint's folder")


def one_file_a_tensor(directory, num_local, page=4096):
    """Give each tensor a file of its own: where an expert tensor's foreign part, which follows the local experts,
    begins is what its file may be cut to."""
    index = json.loads((directory / INDEX).read_text())
    cuts = {}
    for file in sorted(set(index["weight_map"].values())):
        for name, tensor in load_file(directory / file).items():
            own = f"{name}.safetensors"
            save_file({name: tensor}, directory / own)
            index["weight_map"][name] = own
            if ".experts." in name:
                local = tensor[:num_local].numel() * tensor.element_size()
                header = (directory / own).stat().st_size - tensor.numel() * tensor.element_size()
                cuts[own] = -(-(header + local) // page) * page
        (directory / file).unlink()
    (directory / INDEX).write_text(json.dumps(index))
    return cuts


class TestOnlyLocalBytes:
    @pytest.mark.parametrize(("world", "moe_tp"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)])
    def test_each_byte_of_the_experts_is_read_by_one_rank(self, tiny, world, moe_tp):
        parallel = ParallelConfig(world, moe_tp_size=moe_tp)
        replicated = 8 * 128 * 2 + 8 * 2  # router weight and bias
        total = 0
        for rank in range(world):
            with Checkpoint(tiny) as checkpoint:
                parts = load_layer(checkpoint, 0, parallel, rank)
                assert checkpoint.bytes_read == parts.experts.nbytes + replicated
                down_bias = parts.experts.down_bias.nbytes
                total += parts.experts.nbytes - (down_bias if parts.shard.moe_tp_rank else 0)
                experts = [n for n in checkpoint.manifest if ".experts." in n]
                assert len(experts) == 6
        with Checkpoint(tiny) as checkpoint:
            stored = sum(checkpoint.read(name).nbytes for name in experts)
        assert total == stored

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    def test_the_system_sees_no_read_past_the_local_experts(self, tmp_path):
        """Cut foreign experts off the files once they are open: a read of a single page there is an error."""
        tiny = write_tiny_checkpoint(tmp_path / "m", hidden_size=256, intermediate_size=256, num_layers=1)
        cuts = one_file_a_tensor(tiny, num_local=4)
        assert sum((tiny / file).stat().st_size - size for file, size in cuts.items()) > 8 * 4096
        parallel = ParallelConfig(2)
        with Checkpoint(tiny) as checkpoint:
            for file, size in cuts.items():
                if size < (tiny / file).stat().st_size:
                    os.truncate(tiny / file, size)
            load_layer(checkpoint, 0, parallel, 0)
            # The trap does catch: rank 1 needs what was cut off.
            with pytest.raises(CheckpointError, match="can't be read: the file ends at"):
                load_layer(checkpoint, 0, parallel, 1)

    def test_a_placement_of_a_world_of_other_sizes_is_refused(self, tiny):
        placement, attention_tp = ExpertPlacement(8, ParallelConfig(2)), ParallelConfig(2, attention_tp_size=2)
        with pytest.raises(ConfigError, match=r"the placement is for .* sizes \(2, 1\), the world has \(4, 1\)"):
            load_layer(tiny, 0, ParallelConfig(4), 1, placement)
        for parallel in (None, attention_tp):
            assert load_layer(tiny, 0, parallel, 1, placement).shard == placement.shard(1)


class TestAllRanks:
    def test_together_or_not_at_all(self, pools, tmp_path):
        good = write_tiny_checkpoint(tmp_path / "good")
        other = write_tiny_checkpoint(tmp_path / "other", seed=1)
        broken, spoilt = (shutil.copytree(good, tmp_path / name) for name in ("broken", "spoilt"))
        (broken / "model-00002-of-00003.safetensors").unlink()
        set_number(spoilt, SCALES, (7, 3, 1), 255)  # of expert 7
        for folders, error, *words in (
            ((good, good), "loaded"),
            ((good, broken), "CheckpointError", "model-00002-of-00003.safetensors"),  # one rank's missing file
            ((spoilt, spoilt), "CheckpointError", SCALES, "255 (NaN)"),  # in the bytes of one rank's experts
            ((good, other), "WorldMismatch", "same revision"),  # the same names and shapes, other numbers
            ((good, good), "loaded"),
        ):
            found = pools(2).run(jobs.load, directories=[str(folder) for folder in folders])
            if error == "loaded":
                assert found == [("loaded", "0"), ("loaded", "4")]
                continue
            assert found[0] == found[1]
            assert found[0][0] == error
            assert all(word in found[0][1] for word in words), found
            assert found[0][1].startswith("rank 1: ") or error == "WorldMismatch"

    @pytest.mark.parametrize(
        ("ranks", "world_size", "says"),
        [
            ((0, 0), 2, "rank 1 was given experts 0 to 3 of 8, its share is experts 4 to 7 of 8"),
            ((1, 1), 2, "rank 0 was given experts 4 to 7 of 8, its share is experts 0 to 3 of 8"),
            ((0, 0), 1, "rank 0 was given experts 0 to 7 of 8, its share is experts 0 to 3 of 8"),
            ((0, None), 2, "rank 1: parts is NoneType: expected LayerParts"),
        ],
    )
    def test_experts_of_another_rank_are_refused_on_all(self, pools, tmp_path, ranks, world_size, says):
        """Their matrices have the right shapes: nothing later would notice."""
        folder = str(write_tiny_checkpoint(tmp_path, num_layers=1))
        found = pools(2).run(jobs.build, directory=folder, ranks=ranks, world_size=world_size)
        remedy = "" if None in ranks else ": read it with load_layer(..., world.parallel, world.rank)"
        assert found == [f"ConfigError: {says}{remedy}"] * 2
        assert pools(2).run(jobs.build, directory=folder, ranks=(0, 1), world_size=2) == [NOTHING] * 2
