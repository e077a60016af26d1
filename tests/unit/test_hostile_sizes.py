"""Numbers and words in other people's files that would take the machine or the terminal: typed errors instead."""

from __future__ import annotations

import json
import logging
import resource
import struct
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cases import expert_cases as cases
from support.cases.broken_files import LAYER, change_config, set_number, small_checkpoint

from eprt.cli.terminal import Terminal, configure_logging
from eprt.config import MAX_EXPERTS, MAX_WIDTH, MoEConfig, ParallelConfig, RuntimeConfig, SharedExpert
from eprt.errors import CheckpointError, ConfigError, EprtError, UnsupportedError
from eprt.models import load_layer
from eprt.models.checkpoint import CONFIG, SINGLE, Checkpoint
from eprt.models.fields import E2M1_BYTES, E4M3_BYTES, E4M3_FACTOR, NVFP4_FACTOR, activation_scale
from eprt.models.shards import Shard
from eprt.placement import ExpertPlacement

ESCAPE, FLOOD = "\x1b]0;mine\x07\x1b[31m", "x" * 100_211


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small_checkpoint(tmp_path / "model")


def grown_mb(call) -> float:
    """Returns by how much the process grew beyond any size that it had, in MB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    call()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


@pytest.mark.parametrize(
    ("field", "most"),
    [("num_local_experts", MAX_EXPERTS), ("hidden_size", MAX_WIDTH), ("intermediate_size", MAX_WIDTH)],
)
@pytest.mark.parametrize("value", [2**22, 2**31, 2**62])
def test_sizes_of_a_config_have_limits(folder: Path, field: str, most: int, value: int) -> None:
    def refused() -> None:
        with pytest.raises(ConfigError, match=rf"{folder / CONFIG}: .* {value}: expected at most {most}"):
            load_layer(folder, 0)

    change_config(folder, **{field: value})
    started = time.process_time()
    assert grown_mb(refused) < 100
    assert time.process_time() - started < 1


def test_other_sizes_have_limits_too() -> None:
    for refused in (
        lambda: ParallelConfig(2**31),
        lambda: RuntimeConfig(max_tokens_per_rank=2**31),
        lambda: SharedExpert(2**40),
        lambda: ExpertPlacement(2**31, ParallelConfig(1)),
        lambda: MoEConfig(8, 2, 32, 32, model_hidden_size=2**31),
    ):
        with pytest.raises(ConfigError, match="expected at most"):
            refused()


def test_experts_in_order_are_a_range() -> None:
    placement = ExpertPlacement(MAX_EXPERTS, ParallelConfig(8))
    assert isinstance(placement.slots, range)
    assert isinstance(placement.shard(7).experts, range)
    told = ExpertPlacement(8, ParallelConfig(2), tuple(range(8)))
    assert told == ExpertPlacement(8, ParallelConfig(2))
    assert told.shard(1) == ExpertPlacement(8, ParallelConfig(2)).shard(1)
    assert ExpertPlacement(8, ParallelConfig(2), (1, 0, 2, 3, 4, 5, 6, 7)).shard(0).experts == (1, 0, 2, 3)


def of_tensors(count: int, path: Path) -> Path:
    """A file whose header names so many tensors, all empty."""
    entry = '{"dtype":"F32","shape":[1,0],"data_offsets":[0,0]}'
    header = "{" + ",".join(f'"experts.{i}.gate_proj.weight":{entry}' for i in range(count)) + "}"
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode())
    return path


def test_600000_names_in_a_header_are_refused_before_they_are_read(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text("{}")
    of_tensors(600_000, tmp_path / SINGLE)
    started = time.process_time()
    with pytest.raises(CheckpointError, match="about 4800000 values: expected at most 4000000"):
        Checkpoint(tmp_path)
    assert time.process_time() - started < 1


@pytest.mark.long
def test_a_header_may_name_more_tensors_than_other_files_hold_values(tmp_path: Path) -> None:
    assert len(Shard(of_tensors(130_000, tmp_path / SINGLE), Path(SINGLE)).entries) == 130_000


def test_no_memory_is_taken_for_experts_that_are_not_there(tmp_path: Path) -> None:
    """One real expert, and names of others: all shapes are compared before memory is taken for all of them."""
    E, H, I = 256, 32, 4096
    config = {"model_type": "mixtral", "num_hidden_layers": 1, "num_local_experts": E, "num_experts_per_tok": 2}
    (tmp_path / CONFIG).write_text(json.dumps(config | {"hidden_size": H, "intermediate_size": I, "dtype": "bfloat16"}))
    block = "model.layers.0.block_sparse_moe"
    tensors = {f"{block}.gate.weight": torch.zeros(E, H, dtype=torch.bfloat16)}
    for expert in range(E):
        width = I if expert == 0 else 1
        tensors[f"{block}.experts.{expert}.w1.weight"] = torch.zeros(width, H, dtype=torch.bfloat16)
        tensors[f"{block}.experts.{expert}.w3.weight"] = torch.zeros(width, H, dtype=torch.bfloat16)
    save_file(tensors, tmp_path / SINGLE)
    real, taken = torch.Tensor.new_empty, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", lambda self, *given: (taken.append(given), real(self, *given))[1])
        with pytest.raises(
            CheckpointError, match=r"experts\.1\.w1\.weight' has shape \(1, 32\): expected \(4096, 32\)"
        ):
            load_layer(tmp_path, 0)
    assert taken == []


# ---- scales ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accept", "fits", "overflows"),
    [
        (NVFP4_FACTOR, 1.2e35, 3e38),
        (NVFP4_FACTOR, 1.2e35, 1.3e35),
        (E4M3_FACTOR, 7.5e35, 7.7e35),
        (activation_scale, 1e-37, 3e38),
        (activation_scale, 1e-37, 1e-39),
    ],
)
def test_finite_scales_that_overflow_are_refused(accept, fits: float, overflows: float) -> None:
    assert accept(torch.tensor(fits), "file: tensor 'w'") == torch.tensor(fits)
    with pytest.raises(CheckpointError, match=r"file: tensor 'w': .*scale.*: expected"):
        accept(torch.tensor(overflows), "file: tensor 'w'")


@pytest.mark.parametrize(("accept", "largest"), [(E2M1_BYTES, 6.0), (E4M3_BYTES, 448.0)])
def test_e8m0_scales_end_where_their_largest_number_overflows(accept, largest: float) -> None:
    finite = [byte for byte in range(255) if torch.tensor(largest * 2.0 ** (byte - 127)).float().isfinite()]
    assert accept(torch.tensor(finite, dtype=torch.uint8), "w").tolist() == finite
    for byte in range(len(finite), 255):
        with pytest.raises(CheckpointError, match=f"w: E8M0 scale {byte} .*overflow"):
            accept(torch.tensor([1, byte], dtype=torch.uint8), "w")


def test_a_router_that_overflows_the_models_dtype_is_refused(folder: Path) -> None:
    set_number(folder, f"{LAYER}.router.weight", (1, 2), 3.4e38, torch.float32)
    with pytest.raises(CheckpointError, match=r"as torch.bfloat16, holds inf at \[1, 2\]"):
        load_layer(folder, 0)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda w: w.map(torch.Tensor.double),
        lambda w: w.map(torch.Tensor.half),
        lambda w: w.to("meta"),
        lambda w: type(w)(w.gate_up, w.down, w.gate_up_bias.double(), w.down_bias),
        lambda w: type(w)(w.gate_up, None, w.gate_up_bias, w.down_bias),
        lambda w: type(w)(w.gate_up.data, w.down, w.gate_up_bias, w.down_bias),
    ],
    ids=["double", "half", "meta", "double_bias", "none", "tensor"],
)
def test_experts_of_another_dtype_or_device_or_kind_are_refused(spoil) -> None:
    config = cases.make_config(bias=True)
    weights, shard = cases.make_weights(config), ExpertPlacement(config.num_experts, ParallelConfig()).shard(0)
    weights.check(config, shard)
    with pytest.raises(ConfigError, match=r"expected|on the meta device"):
        spoil(weights).check(config, shard)


# ---- words ----------------------------------------------------------------------------------------------------------


def harmless(text: str) -> bool:
    return not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in text)


@pytest.mark.parametrize("kind", [CheckpointError, ConfigError, UnsupportedError])
def test_a_message_neither_steers_nor_floods_a_terminal(kind: type[EprtError]) -> None:
    said = str(kind(f"a file says {ESCAPE}{FLOOD}"))
    assert harmless(said)
    assert said.startswith("a file says ")
    assert len(said) <= 20_000


def test_names_of_tensors_and_files_are_cut(folder: Path) -> None:
    path = next(iter(folder.glob("*.safetensors")))
    name = f"{LAYER}.{ESCAPE}{FLOOD}"
    save_file(load_file(path) | {name: torch.zeros(1)}, path)
    index = next(folder.glob("*.index.json"))
    whole = json.loads(index.read_text())
    whole["weight_map"][name] = path.name
    index.write_text(json.dumps(whole))
    with pytest.raises(CheckpointError, match="belongs to this layer") as caught:
        load_layer(folder, 0)
    assert harmless(str(caught.value))
    assert len(str(caught.value)) < 1000


def test_what_a_command_prints_of_others_steers_no_terminal(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    words = f"model {ESCAPE}\x9b31m\tdone\nnext  　"
    terminal = Terminal(speaks=True)
    for say in (terminal.say, terminal.note, terminal.error):
        say(words)
    terminal.table("title", {"name": "name"}, [{"name": words}])
    logger = logging.getLogger("eprt")
    monkeypatch.setattr(logger, "handlers", [])
    configure_logging()
    logger.warning("a peer says %s", words)
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        assert harmless(text)
        assert text.count("done\nnext  　") >= 1
