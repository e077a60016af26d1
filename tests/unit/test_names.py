"""One name for one thing, and files that are read in one sitting."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest
from support.long_tests import LONG, SLOW, TRANSFORMERS

import eprt

ROOT = Path(eprt.__file__).parent
SOURCES = {path.relative_to(ROOT): path for path in ROOT.rglob("*.py")}
MAX_LINES = 400


def test_no_public_class_name_stands_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for name, path in SOURCES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(name))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_file_is_longer_than_400_lines() -> None:
    lines = {str(name): len(path.read_text().splitlines()) for name, path in SOURCES.items()}
    assert {path: count for path, count in lines.items() if count > MAX_LINES} == {}


@pytest.mark.parametrize("pattern", [*LONG, *SLOW, *TRANSFORMERS])
def test_what_is_said_of_tests_is_of_tests_that_exist(pattern: str) -> None:
    file, _, test = pattern.partition("::")
    (path,) = Path(__file__).parents[1].rglob(f"{file}.py")
    assert not test or re.search(rf"def {re.split('[^a-z_0-9]', test)[0]}", path.read_text())
