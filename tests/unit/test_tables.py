"""Tables and pictures on the pages are what `python docs/figures/tables.py` writes, and lead to their source."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = "python docs/figures/tables.py"


@pytest.fixture(scope="module")
def tables():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs/figures"))
        yield importlib.import_module("tables")


@pytest.fixture(scope="module")
def pictures(tables):
    pytest.importorskip("matplotlib")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs/figures"))
        yield importlib.import_module("pictures")


def test_pages_are_what_the_command_writes(tables) -> None:
    found: list[str] = []
    for page in sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md")]):
        text, name = page.read_text(), str(page.relative_to(ROOT))
        regions = [region for _, region, _ in tables.REGION.findall(text)]
        assert len(regions) == text.count(f"{COMMAND} -->"), f"{name}: a region that doesn't end"
        assert not regions or name.startswith("docs/"), f"{name}: the command doesn't write it"
        assert text == tables.written(name, text), f"{name}: run {COMMAND}"
        found += regions
    assert sorted(found) == sorted(tables.TABLES), "a table that no page shows, or two do"


def test_what_a_result_file_says_reaches_the_page(tables, monkeypatch) -> None:
    page = (ROOT / "docs/hardware.md").read_text()
    rows = [dict(row) for row in tables.result("dispatch_h200_x2")["rows"]]
    for row in rows:
        row["p50_us"] = 12345.0 if (row["transport"], row["tokens"]) == ("symm", 4096) else row["p50_us"]
    changed, read = tables.result("dispatch_h200_x2") | {"rows": rows}, tables.result
    monkeypatch.setattr(tables, "result", lambda name: changed if name == "dispatch_h200_x2" else read(name))
    assert "`symm` | 7.0 | 6.9 | 8.8 | 17.0 | 49.5 | 93.7 | 178 | 12345 |" in tables.written("docs/hardware.md", page)


def test_every_table_and_picture_leads_to_its_source(tables) -> None:
    for name, make in tables.TABLES.items():
        links = re.findall(r"\]\((benchmarks/results/[\w/]+\.json)\)", make())
        assert links, name
        assert all((ROOT / link).exists() for link in links)
    hardware = (ROOT / "docs/hardware.md").read_text()
    for picture in re.findall(r"!\[.*\]\(figures/(\w+)\.svg\)", hardware):
        assert f"](../benchmarks/results/{picture}.json)" in hardware


def test_pictures_show_the_rows_that_are_there_now(pictures) -> None:
    """By the hash that a picture carries: how it is drawn depends on matplotlib's version."""
    drawn = {path.stem: path.read_text() for path in (ROOT / "docs/figures").glob("*.svg") if path.stem != "rooms"}
    assert drawn.keys() == pictures.PICTURES.keys()
    assert [name for name, text in drawn.items() if pictures.shown(name) not in text] == [], f"run {COMMAND}"
    assert all(len(text) < 80_000 for text in drawn.values())


def test_a_picture_is_the_same_each_time(pictures) -> None:
    first = pictures.svg("step_h200_x2")
    assert first == pictures.svg("step_h200_x2")
    assert b"<dc:date>" not in first


def test_no_measured_line_lies_below_the_lower_bound_of_its_own_format(pictures) -> None:
    """Bf16 weights take more bytes than MXFP4, so a panel with both draws two bounds."""
    from eprt.bench.plot import lower_bounds

    for name in pictures.PICTURES:
        report = pictures.report(name)
        bounds = {shape: lower_bounds(report.bench, rows) for shape, rows in panels(report.rows).items()}
        assert bool(bounds[next(iter(bounds))]) is (report.bench != "step")
        for row in report.rows if report.bench != "step" else ():
            us = row["p50_us" if report.bench == "dispatch" else "us"]
            assert us >= bounds[panel_of(row)][row.get("weight_format", "")][row["tokens"]], f"{name}: {row}"
    experts = pictures.report("experts_grouped_h200")
    assert set(lower_bounds("experts", panels(experts.rows)["gpt-oss-120b",])) == {"mxfp4", "bf16"}


def panel_of(row):
    return tuple(row[name] for name in ("shape", "hidden", "top_k") if name in row)


def panels(rows):
    found = {}
    for row in rows:
        found.setdefault(panel_of(row), []).append(row)
    return found
