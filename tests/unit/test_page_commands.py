"""Every `eprt` command of the pages' blocks runs, on CPU ranks and smaller sizes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from eprt import balance
from eprt.cli import main
from eprt.cli.parsing import COMMANDS

ROOT = Path(__file__).parents[2]
TINY = ["--world", "2", "--device", "cpu", "--tokens", "2"]
# Flags that come after the page's own and win: a CPU's sizes. Other commands run as they stand.
SMALLER = {
    "bench layer": [*TINY, "--shapes", "tiny"],
    "bench dispatch": [*TINY, "--shapes", "h2880k4", "--transports", "torch"],
    "bench router": ["--tokens", "2", "--shapes", "gpt-oss-120b"],
    "bench exchange": ["--world", "2", "--device", "cpu", "--rounds", "5"],
    "warm": ["--max-tokens-per-rank", "1"],
    "bench step": ["--device", "cpu", "--models", "tiny", "--layers", "1", "--tokens", "1", "--rounds", "1"],
}
ELSEWHERE = {  # with the page's own backends
    "doctor --run --plugin my_backends": "test_plugins",
    "explain --plugin my_backends --model Qwen3-30B-A3B": "test_plugins",
    "run --plugin my_backends --dispatcher broadcast --executor one_by_one": "test_plugins",
}


def commands() -> list[str]:
    pages = "\n".join(path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", pages, flags=re.DOTALL))
    lines = re.findall(r"^(?:\.venv/bin/)?eprt (.*)$", blocks, flags=re.MULTILINE)
    return list(dict.fromkeys(shlex.join(shlex.split(line, comments=True)) for line in lines))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("line", commands())
def test_it_runs(tiny: Path, line: str, tmp_path: Path, monkeypatch, capsys) -> None:
    if line in ELSEWHERE:
        pytest.skip(ELSEWHERE[line])
    monkeypatch.chdir(tmp_path)
    balance.write_counts("counts.json", {0: torch.arange(128), 1: torch.arange(128).flip(0)})
    words = ["gpt-oss-120b" if word == "MODEL" else str(tiny) if word == "DIR" else word for word in line.split()]
    name = next(name for name in COMMANDS if line.startswith(name))
    wanted = 2 if name in ("bench experts", "bench router") and not torch.cuda.is_available() else 0
    assert main([*words, *(["--ranks", "16", "32"] if "--simulate" in words else SMALLER.get(name, []))]) == wanted
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 if wanted else out


def test_explain_shows_what_the_limits_page_says_that_it_shows(capsys) -> None:
    page = " ".join((ROOT / "docs/limits_and_errors.md").read_text().split())
    for line in re.findall(r"`eprt (explain [^`]+)`", page):
        assert main(line.split()) == 0
    shown = capsys.readouterr().out
    assert "symm: needs all ranks on one NVLink host" in shown
    assert "goes on without a rank that is lost between two steps" in shown


def test_the_pages_show_what_every_command_is_for() -> None:
    """Those that no block shows have tests of their own."""
    shown = {name for name in COMMANDS for line in commands() if line.startswith(name)}
    assert set(COMMANDS) - shown <= {"run", "generate", "tune"}
