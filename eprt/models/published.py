"""The published config.json of well-known models: the fields that eprt and its benches read.

`published.json` holds them, lists of modules as one pattern, and a model that differs from an earlier one only in some
fields as those and the other's name, in `like`. gpt-oss's are whole: tiny checkpoints are made of them. `eprt explain
--model NAME` and `eprt tune --model NAME` answer from it without any file of the model. Names are those of the Hugging
Face repositories, in any case, without the organisation. A checkpoint's own config.json takes precedence.
"""

from __future__ import annotations

import json
import os
from importlib import resources
from pathlib import Path
from typing import Any

from eprt.config import MoEConfig
from eprt.errors import ConfigError
from eprt.models import family_for
from eprt.models.checkpoint import read_config

MODELS: dict[str, dict[str, Any]] = {}
for _name, _row in json.loads(resources.files("eprt.models").joinpath("published.json").read_text()).items():
    MODELS[_name] = MODELS.get(_row.pop("like", ""), {}) | _row


def model_config(model: str | Path) -> dict[str, Any]:
    """Returns the config.json of a checkpoint's folder, of that file itself, or of a model of `MODELS` by its name.

    Raises:
        CheckpointError: a path that can't be read.
        ConfigError: neither a path nor a name of the table; the message lists them.
    """
    path, known = Path(model), {name.lower(): config for name, config in MODELS.items()}
    if len(path.parts) > 2 or path.is_absolute() or os.path.exists(path):  # Path.exists() may raise
        return read_config(path)
    if found := known.get(path.name.lower()):
        return found
    raise ConfigError(
        f"--model {model}: there is no such file or folder, and no such name here; known are {', '.join(MODELS)}"
    )


def published_layer(name: str, number: int = -1) -> MoEConfig:
    """Returns the maths of the `number`-th MoE layer of a model of `MODELS`, by default of the last one."""
    hf = MODELS[name]
    family = family_for(hf)
    return family.moe_config(hf, family.moe_layers(hf)[number])
