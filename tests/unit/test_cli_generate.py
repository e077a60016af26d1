"""`eprt generate`: JSON lines in, JSON lines out."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from eprt.cli import main
from eprt.models.tiny import write_tiny_checkpoint

pytest.importorskip("transformers", reason="pip install 'eprt[transformers]'")

WORDS = ["generate", "--device", "cpu", "--max-new-tokens", "4"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("generate") / "tiny", num_layers=1)


def test_prompts_come_back_in_order_with_their_fields(tiny: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    lines = [{"prompt": [5, 6, 7], "id": "a"}, [8], {"prompt": [9] * 20, "id": "c"}]
    text = "\n".join(json.dumps(line) for line in lines) + "\n\n"
    (tmp_path / "prompts.jsonl").write_text(text)
    words = [*WORDS, "--model", str(tiny), "--world", "2", "--batch", "1"]
    assert main([*words, "--prompts", str(tmp_path / "prompts.jsonl")]) == 0
    out, err = capsys.readouterr()
    found = [json.loads(line) for line in out.splitlines()]
    assert [row.get("id") for row in found] == ["a", None, "c"]
    assert [row["prompt"] for row in found] == [[5, 6, 7], [8], [9] * 20]
    assert [row["rank"] for row in found] == [0, 1, 0], "the second rank has nothing in the last round"
    assert all(1 <= len(row["tokens"]) <= 4 for row in found)
    assert "tokens/s by rank" in err
    assert "3 of 3 done" in err
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert main([*words, "--prompts", "-"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == found


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", ":1: not JSON"),
        ('{"text": "hello"}', 'expected {"prompt": "text" or [token ids]}'),
        ("[1.5]", "expected"),
        ("[]", "expected"),
        ('"hello"', "a prompt is text and the checkpoint has no tokenizer"),
        ("[99999]", "expected 0 to 511"),
    ],
)
def test_a_wrong_line_is_refused(tiny: Path, tmp_path: Path, line: str, said: str, capsys) -> None:
    (tmp_path / "prompts.jsonl").write_text(line + "\n")
    words = [*WORDS, "--model", str(tiny), "--world", "2", "--prompts", str(tmp_path / "prompts.jsonl")]
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_no_such_file(capsys) -> None:
    assert main([*WORDS, "--prompts", "/no/such"]) == 2
    assert "--prompts /no/such: No such file" in capsys.readouterr().err
