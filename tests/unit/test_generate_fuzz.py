"""Random prompts, journals and options: `eprt generate` ends with 0 or 2 and one line, and changes no file but its own.

EPRT_FUZZ=2000 runs as many cases; EPRT_FUZZ_FIRST=1000 begins with that one, whose number is its seed. In one process:
a World of one rank serves all of them.
"""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path

import pytest
from support.cases.text_model import write_tokenizer
from support.libraries import needs

from eprt.cli import generate as command
from eprt.cli import main
from eprt.conformance.tiny_model import write_tiny_checkpoint

pytestmark = needs("transformers")

CASES = int(os.environ.get("EPRT_FUZZ", "100"))
FIRST = int(os.environ.get("EPRT_FUZZ_FIRST", "0"))
CHUNK = 50
HEADER = b'{"eprt generate": '
LINES = [
    *(b"[1, 2, 3]", b"[7]", b'"!a"', b'{"prompt": [5, 6], "id": 3}', b'{"prompt": "xyz", "seed": -4, "rank": []}'),
    *(b'{"messages": [{"role": "user", "content": "hi"}]}', b"[4, 4]", b"[9, 8, 7]", b'{"prompt": [2], "text": 0}'),
    *(b"", b"  ", b"\r", b"{}", b"[]", b"null", b"[511]", b"[512]", b"[-1]", b"[1.0]", b"[true]", b"[null]", b'""'),
    *(b"[%d]" % 2**70, b'{"prompt": {"a": 1}}', b'{"messages": "hi"}', b'{"messages": [{"role": 1}]}', b"NaN"),
    *(b'{"prompt": [1], "seed": 1e9}', b'{"prompt": [1], "x": 1e999}', b'"\\ud800"', b'"\xff"', b"[" * 5000, b"\0"),
    *(b'{"messages": [{"role": "user", "content": null}]}', b'{"messages": [{"role": "", "content": []}]}', b"[1]]"),
    *(b'{"prompt": "a", "messages": []}', b'{"eprt generate": {}}', b'{"given": {"prompt": [7]}, "tokens": [1]}'),
    b'"\\u2028 \xe2\x80\xa8"',
]
GOOD = LINES[:9]
FLAGS = {
    "--temperature": ("0", "0.7", "1", "30", "-1", "nan", "1e-30", "x"),
    "--top-p": ("0.5", "1", "1e-9", "0", "2", "inf"),
    "--top-k": ("1", "0", "600", "-3", "1.5"),
    "--min-p": ("0", "0.1", "1", "-1", "nan"),
    "--repetition-penalty": ("1", "1.3", "0.01", "0", "1e300", "-inf"),
    "--stop-strings": ("!", "ab", "<|200|>", "", "\x1b[31m", "é"),
    "--max-new-tokens": ("1", "3", "0", "-2", "2.5"),
    "--seed": ("0", "7", "-1", str(2**80), "a"),
    "--batch": ("1", "2", "5", "0", "-1"),
    "--max-tokens": ("1", "3", "64", "0", "-5"),
    "--world": ("1", "0", "-1"),
    "--device": ("cpu", "tpu"),
    "--no-graphs": (),
    "--graphs": (),
    "--surprise": ("", "1"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    """A mute model, one with a tokenizer and a sampling generation_config.json, one with a wrong one."""
    root = tmp_path_factory.mktemp("fuzz")
    folders = [write_tiny_checkpoint(root / name, num_layers=1) for name in ("mute", "speaking", "wrong")]
    for folder in folders[1:]:
        write_tokenizer(folder, 512)
    settings = {"do_sample": True, "temperature": 1.5, "top_k": 40, "eos_token_id": [3, 511], "max_new_tokens": 3}
    (folders[1] / "generation_config.json").write_text(json.dumps(settings))
    (folders[2] / "generation_config.json").write_text("[]")
    return folders


@pytest.mark.timeout(550)
@pytest.mark.parametrize("first", range(FIRST, FIRST + CASES, CHUNK))
def test_it_ends_with_a_result_or_one_line(
    first: int, models, this_process, tmp_path: Path, monkeypatch, capfd
) -> None:
    monkeypatch.setattr(command, "ranks", this_process)
    codes = []
    for number in range(first, first + CHUNK):
        folder = tmp_path / str(number)
        folder.mkdir()
        codes.append(check(random.Random(number), models, folder, capfd, number))
    assert 3 <= codes.count(0) <= CHUNK - 3, "cases that are all of one kind"


def check(draw: random.Random, models: list[Path], folder: Path, capfd, number: int) -> int:
    """Runs one case; returns its exit code."""
    prompts, output = folder / "prompts.jsonl", folder / "answers.jsonl"
    model = draw.choices([*models, folder / "none"], [10, 20, 1, 1])[0]
    good = [line for line in GOOD if model != models[0] or not re.search(rb'"(!|xyz|messages)', line)]
    lines = [draw.choice(good if draw.random() < 0.95 else LINES) for _ in range(draw.randrange(1, 7))]
    prompts.write_bytes(mutated(draw, b"\n".join(lines), 0.1))
    words = ["generate", "--model", str(model), "--prompts", str(prompts), "--world", "1", "--device", "cpu"]
    for name in draw.sample(sorted(FLAGS), draw.randrange(3)):
        values = FLAGS[name]
        words += [name, draw.choice(values if draw.random() < 0.3 else values[:2])] if values else [name]
    if "--max-new-tokens" not in words and model != models[1]:
        words += ["--max-new-tokens", "2"]
    if draw.random() < 0.7:
        words += ["--output", str(output)]
        leave_something(draw, prompts, output, words)
    before = contents(folder)
    capfd.readouterr()
    try:
        code = main(words)
    except SystemExit as ended:  # of the parser, whose message has a frame
        code, said = ended.code, ["eprt: the parser's"]
    else:
        said = [line for line in capfd.readouterr().err.splitlines() if line]
    assert code in (0, 2), (number, words, said)
    if code == 2:
        assert len(said) == 1, (number, words, said)
        assert said[0].startswith("eprt: "), (number, words, said)
        assert said[0].isprintable(), (number, words, said)
    after = contents(folder)
    for name, held in before.items():
        own = name == output.name and (held.startswith(HEADER) or HEADER.startswith(held))
        assert after[name] == held or (own and code == 0), (number, words, name)
    assert set(after) <= {*before, output.name}
    if code == 0 and "--output" in words:
        asked = sum(bool(line.strip()) for line in before[prompts.name].split(b"\n"))
        assert after[output.name].count(b"\n") == 1 + asked, (number, words)
    return code


def leave_something(draw: random.Random, prompts: Path, output: Path, words: list[str]) -> None:
    """Puts something where answers are to go: nothing, notes, this command's own or another's answers, spoilt ones, or
    another name of the prompts."""
    match draw.randrange(8):
        case 0:
            output.write_bytes(mutated(draw, b"my notes\n" * draw.randrange(3), 0.3))
        case 1:
            output.symlink_to(prompts) if draw.random() < 0.5 else output.hardlink_to(prompts)
        case 2:
            output.mkdir() if draw.random() < 0.5 else os.mkfifo(output)
        case 3 | 4 | 5:
            own = [word for word in words if word != "--surprise"]
            try:
                main(own if draw.random() < 0.7 else [*own, "--seed", "5"])
            except SystemExit:
                return
            if output.exists() and draw.random() < 0.6:
                held = output.read_bytes()
                cut = held[: draw.randrange(len(held) + 1)]
                output.write_bytes(cut if draw.random() < 0.5 else mutated(draw, held, 1.0))


def mutated(draw: random.Random, data: bytes, chance: float) -> bytes:
    """The bytes, with that chance with one to three of them changed, doubled or left out."""
    found = bytearray(data)
    for _ in range(draw.randrange(1, 4) if draw.random() < chance and data else 0):
        at = draw.randrange(len(found) + 1)
        found[at : at + draw.randrange(3)] = draw.choice([b"", b"\n", b'"', b"\xc3", b"}", draw.randbytes(2)])
    return bytes(found)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() if path.is_file() else b"" for path in folder.iterdir()}
