"""eprt inside SGLang: the routed experts of every MoE layer, on one GPU, on a part of them, or over all ranks.

    SGLANG_PLUGINS=eprt sglang serve --model-path MODEL --tp-size 2 --dp-size 2 --ep-size 2 --enable-dp-attention

SGLang keeps the router (but see `routing`), the shared experts, loading by name, scheduling, sampling and the idle
batches. Hooks go through SGLang's own `HookRegistry`; no file of it is changed. Layers that eprt can't run fall back to
SGLang, and the log says which and why (`supported`).

SGLang loads every installed plugin unless `SGLANG_PLUGINS` names some. Many machines have eprt for another purpose, so
the plugin acts only where it is named there, or where `EPRT_SGLANG` is set: options in JSON, which docs/sglang.md has.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os

from eprt.errors import ConfigError
from eprt.integrations.engine import version_warning

__all__ = ["TESTED", "check_version", "register"]

TESTED = ("0.5.17", "0.5.23")  # tests ran on both on a CPU; GPUs on the former
OLDEST, BELOW = "0.5.17", "0.5.24"


def check_version(found: str) -> str:
    """Returns what is worth a warning about this SGLang, or "". Raises ConfigError for one whose hooks weren't read."""
    return version_warning("SGLang", found, OLDEST, BELOW, TESTED)


def asked_for() -> bool:
    """Returns whether this process should have the plugin: it is named, or has options."""
    named = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")}
    return "eprt" in named or bool(os.environ.get("EPRT_SGLANG"))


def register() -> None:
    """Registers the plugin's hooks, as the entry point of `sglang.srt.plugins`.

    SGLang calls it in every process and swallows what it raises: a refusal is kept, and said by the first layer.
    """
    logger = logging.getLogger("sglang.eprt")
    if not asked_for():
        logger.info("eprt: installed, not asked for: SGLANG_PLUGINS=eprt gives it the experts")
        return
    from eprt.integrations.sglang.hooks import install
    from eprt.integrations.sglang.state import SglangState

    state = SglangState()
    try:
        if warning := check_version(importlib.metadata.version("sglang")):
            logger.warning("eprt: %s", warning)
    except ConfigError as error:
        state.unfit = str(error)
    install(state)
