"""Loads the competing libraries that benches measure in the same run as eprt's own backends.

They lie in `benchmarks/baselines` of a checkout, outside the wheel, because they call internals of vLLM and others.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import eprt
from eprt.errors import ConfigError

FOLDER = "EPRT_BASELINES"  # names a copy of benchmarks/baselines, for an eprt that was installed from a wheel
MISSING = f"baselines: not installed; they are benchmarks/baselines of eprt's repository, which {FOLDER} can name"


@cache
def baselines() -> ModuleType | None:
    """Returns the package `benchmarks/baselines`, or None outside a checkout.

    Raises:
        ConfigError: EPRT_BASELINES names a folder that isn't a copy of it.
    """
    named = os.environ.get(FOLDER)
    folder = Path(named) if named else Path(eprt.__file__).resolve().parents[1] / "benchmarks" / "baselines"
    file = folder / "__init__.py"
    if not file.is_file():
        if named:
            raise ConfigError(f"{FOLDER}={named}: there is no {file.name} in it; name a copy of benchmarks/baselines")
        return None
    spec = importlib.util.spec_from_file_location("eprt_baselines", file, submodule_search_locations=[str(folder)])
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file} can't be imported as a package")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
