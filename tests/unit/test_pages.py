"""README, CONTRIBUTING and docs/ say what is true: paths exist, commands run, flags parse, tables are the code's."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import eprt
from eprt import balance
from eprt.cli import main
from eprt.cli.parsing import COMMANDS, parse
from eprt.dispatch import DISPATCHERS
from eprt.experts import EXECUTORS

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")),
)
README = (ROOT / "README.md").read_text()
CHOOSE = (ROOT / "docs/choose.md").read_text()
SCRIPTS = sorted(
    p for p in [*ROOT.glob("scripts/*.sh"), *ROOT.glob("launch/*"), ROOT / ".ci" / "run"] if p.suffix != ".yaml"
)


def paths(text: str) -> set[str]:
    """What looks like a path of this repository in backticks, links and code blocks."""
    known = "eprt|tests|scripts|launch|benchmarks|docs|LICENSE|CONTRIBUTING.md|CHANGELOG.md|README.md|.ci"
    return set(re.findall(rf"(?<![\w/.-])((?:{known})(?:/[\w.-]+)*/?)(?=[`)\s:,;])", text))


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


TEXT = "\n".join((ROOT / page).read_text() for page in PAGES)
LINES = re.findall(r"^(?:\.venv/bin/)?eprt (.*)$", "\n".join(code_blocks(TEXT, "bash")), flags=re.MULTILINE)
SHOWN = list(dict.fromkeys(shlex.join(shlex.split(line, comments=True)) for line in LINES))  # commands in blocks
IN_PROSE = re.findall(r"`eprt ((?:run|generate|explain|doctor|bench)[^`]*)`", TEXT)
BY_PLUGINS = [line for line in SHOWN if "my_backends" in line]  # run by test_plugins.py
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


def test_the_patterns_find_something() -> None:
    assert {"scripts/run.sh", "scripts/test.sh", "docs/choose.md", "LICENSE"} <= paths(README)
    assert "eprt/plan/measured.json" in paths(CHOOSE)
    assert len(SHOWN) >= 15
    assert len(IN_PROSE) >= 10


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    missing = [path for path in paths(text) if "NAME" not in path and not (ROOT / path).exists()]
    assert not missing
    here = (ROOT / page).parent
    linked = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    assert not [target for target in linked if target and not (here / target).exists()]
    held = (ROOT / "docs", ROOT / "benchmarks/results")  # by the site; others fail `mkdocs build --strict`
    left = [target for target in linked if not any((here / target).resolve().is_relative_to(folder) for folder in held)]
    assert not left or here == ROOT


@pytest.mark.parametrize("line", [*IN_PROSE, *BY_PLUGINS])
def test_commands_that_are_not_run_here_parse(line: str) -> None:
    if line != "bench":  # all of them
        parse(["explain", "--model", "DIR"] if line == "explain" else shlex.split(line))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("line", [line for line in SHOWN if line not in BY_PLUGINS])
def test_commands_in_blocks_run(tiny: Path, line: str, tmp_path: Path, monkeypatch, capsys) -> None:
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
    shown = {name for name in COMMANDS for line in SHOWN if line.startswith(name)}
    assert set(COMMANDS) - shown <= {"run", "generate", "tune"}


def test_the_launch_page_lists_every_environment_variable_and_no_other() -> None:
    sources = [path for folder in ("eprt", "launch") for path in (ROOT / folder).rglob("*") if path.suffix != ".pyc"]
    read = {name for p in sources if p.is_file() for name in re.findall(r"\bEPRT_[A-Z_]+\b", p.read_text())}
    assert read == set(re.findall(r"^\| `(EPRT_\w+)`", (ROOT / "docs/launch.md").read_text(), flags=re.MULTILINE))


def test_the_two_commands_are_the_scripts_that_ci_runs() -> None:
    block = code_blocks(README, "bash")[0]
    first_two = [shlex.split(line, comments=True) for line in block.strip().splitlines()]
    assert first_two == [["bash", "scripts/run.sh"], ["bash", "scripts/test.sh"]]
    ci = [line for line in (ROOT / ".ci/run").read_text().splitlines() if line.startswith("bash ")]
    assert [shlex.split(line) for line in ci] == [*first_two, ["bash", "scripts/test_long.sh"]]


def test_python_blocks_use_public_names_that_exist() -> None:
    for block in code_blocks(TEXT, "python"):
        compile(block, "a page", "exec")
        for name in re.findall(r"\beprt\.([A-Za-z_]+)", block):
            assert hasattr(eprt, name) or find_spec(f"eprt.{name}"), name


@pytest.mark.parametrize(("table", "heading"), [(DISPATCHERS, "### Dispatchers"), (EXECUTORS, "### Executors")])
def test_backend_tables_list_every_row_and_no_other(table, heading: str) -> None:
    section = CHOOSE.split(heading)[1].split("\n#")[0]
    assert set(re.findall(r"^\| `(\w+)`", section, flags=re.MULTILINE)) == set(table)
    for name, spec in table.items():
        row = next(line for line in section.splitlines() if line.startswith(f"| `{name}`"))
        if spec.requirement is not None:
            assert spec.requirement.minimum in row or spec.requirement.module == "triton", name


def cells(section: str, column: str) -> dict[str, str]:
    """One column of a table by the row's name."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    index = lines[0].index(column)
    return {line[0].strip("`"): line[index] for line in lines[2:]}


def test_backend_tables_say_what_the_rows_say() -> None:
    dispatchers = CHOOSE.split("### Dispatchers")[1].split("\n#")[0]
    executors = CHOOSE.split("### Executors")[1].split("\n#")[0].split("\n\n")[1]
    words = {"flat": "flat", "expert_major": "expert-major"}
    yes_no = {True: "yes", False: "no"}
    rows = DISPATCHERS.items()
    assert cells(dispatchers, "formats") == {n: ", ".join(words[f] for f in spec.formats) for n, spec in rows}
    assert cells(dispatchers, "CUDA graphs") == {name: yes_no[spec.graph_safe] for name, spec in rows}
    assert cells(dispatchers, "can go on without a rank") == {name: spec.shrink for name, spec in rows}
    limits = {name: re.search(r"up to (\d+) ranks", cell) for name, cell in cells(dispatchers, "runs on").items()}
    assert {n: found and int(found[1]) for n, found in limits.items()} == {n: s.max_ranks for n, s in rows}
    formats = {name: "both" if len(spec.formats) == 2 else words[spec.formats[0]] for name, spec in EXECUTORS.items()}
    assert cells(executors, "formats") == formats


def test_shown_output_is_what_the_command_prints() -> None:
    """Its words, not its times: titles, columns and the verdict of the first command's last lines."""
    shown = code_blocks(README, "text")[0]
    source = (ROOT / "eprt/cli/run.py").read_text()
    for words in ("Each rank, all layers and steps together", "error = ||output - oracle|| / ||oracle||", "PASS"):
        assert words in shown
        assert words in source
    assert "PASS: 2 MoE layers of the tiny gpt-oss (8 experts in mxfp4, top-4) ran on 4 gloo ranks" in shown


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts_are_bash_that_stops_at_errors(script: Path) -> None:
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in text
    assert script.stat().st_mode & 0o111, "not executable"
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize("gpus", ["1", "2"])
@pytest.mark.parametrize("options", [[], ["--rehearse"]])
def test_the_session_on_gpus_speaks_commands_that_exist(gpus: str, options: list[str]) -> None:
    command = ["bash", "scripts/gpu_session.sh", gpus, "--list", "--out", "/dev/null/x", *options]
    settings = os.environ | {"PYTHON": "python3"}
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, check=True)
    listed = done.stdout.splitlines()
    ours = [line.partition(" -m eprt ")[2] for line in listed if " -m eprt " in line]
    assert len(ours) >= 7
    for line in ours:
        assert parse(shlex.split(line)), line
    rest = [line for line in listed if " -m eprt " not in line]
    assert all(
        re.search(r"scripts/test_gpu\.sh|tests/gpu|benchmarks/(vllm_duel|two_hosts)\.py", line) for line in rest
    ), rest
    named = [line.split()[0] for line in listed]
    assert len(set(named)) == len(named)


def test_the_api_page_has_every_public_name_and_no_other() -> None:
    command, settings = [sys.executable, "-c", "import api; print(api.page(), end='')"], {"PYTHONPATH": str(ROOT)}
    pipes = {"capture_output": True, "text": True, "check": True}
    written = subprocess.run(command, cwd=ROOT / "docs", env=os.environ | settings, **pipes)
    assert (ROOT / "docs/api.md").read_text() == written.stdout, "run: python docs/api.py"


def test_the_site_knows_every_page() -> None:
    named = set(re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    assert named == {path.name for path in (ROOT / "docs").glob("*.md")}


def test_pages_hold_no_placeholder() -> None:
    assert not re.findall(r"\b(TODO|TBD|FIXME|XXX)\b", TEXT)
