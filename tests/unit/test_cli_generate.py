"""`eprt generate`: JSON lines in, JSON lines out."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eprt.cli import main
from eprt.cli.generate import Journal
from eprt.conformance.tiny_model import write_tiny_checkpoint
from eprt.errors import ConfigError

pytest.importorskip("transformers", reason="pip install 'eprt[transformers]'")

ROOT = Path(__file__).parents[2]
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


PROMPTS = [{"prompt": [5 + number % 2, 7], "id": number} for number in range(5)]  # two, in turn
ANSWERS = [{**prompt, "tokens": [1, 2], "rank": 0} for prompt in PROMPTS]


def lines(rows: list[dict]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.mark.parametrize(
    ("held", "done"),
    [
        (b"", 0),
        (lines(ANSWERS[:2]), 2),
        (lines(ANSWERS), 5),
        (lines(ANSWERS[:3])[:-1], 2),  # cut off before its end of line, though it is whole JSON
        (lines(ANSWERS[:2]) + b'{"prompt": [5, 7], "id": 2, "tok', 2),
        (lines(ANSWERS[:2]) + b"\xff\n", 2),
    ],
)
def test_a_journal_goes_on_after_its_last_whole_line(tmp_path: Path, held: bytes, done: int) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_bytes(held)
    journal = Journal(path, PROMPTS)
    assert journal.done == done
    journal.write(ANSWERS[done:])
    journal.close()
    assert path.read_bytes() == lines(ANSWERS)


@pytest.mark.parametrize(
    ("held", "where"),
    [
        (lines([ANSWERS[1]]), 1),
        (lines([*ANSWERS, ANSWERS[0]]), 6),
        (b"not an answer\n" + lines(ANSWERS[:1]), 1),
        (lines([{**PROMPTS[0]}, ANSWERS[1]]), 1),
    ],
)
def test_answers_to_other_prompts_are_kept(tmp_path: Path, held: bytes, where: int) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_bytes(held)
    with pytest.raises(ConfigError, match=rf"answers.jsonl:{where} answers another prompt"):
        Journal(path, PROMPTS)
    assert path.read_bytes() == held


def test_a_restarted_world_goes_on_where_it_was(tiny: Path, tmp_path: Path) -> None:
    """Rank 1 is killed in the second round, after rank 0 began a line that it doesn't finish."""
    (tmp_path / "prompts.jsonl").write_bytes(lines(PROMPTS))
    words = ["--model", tiny, "--batch", "1", "--max-new-tokens", "4", "--device", "cpu"]
    words += ["--prompts", tmp_path / "prompts.jsonl"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    settings = {"PYTHON": sys.executable, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RANKS": "2", "MAX_RESTARTS": "1"}
    command = [ROOT / "launch/node.sh", ROOT / "tests/support/jobs/killed_generate.py", *words]
    found = subprocess.run(
        [str(word) for word in [*command, "--output", tmp_path / "answers.jsonl"]],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert found.returncode == 0, found.stderr
    assert "2 of 5 prompts are answered in the file already" in found.stderr
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [{name: row[name] for name in ("prompt", "id")} for row in rows] == PROMPTS
    assert rows[0]["tokens"] == rows[2]["tokens"] == rows[4]["tokens"], "by the first world, and by the second"
    assert rows[1]["tokens"] == rows[3]["tokens"] != rows[0]["tokens"]
