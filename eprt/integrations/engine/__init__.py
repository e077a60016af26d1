"""The part that the plugins of all engines share: how a layer is bound, planned, built, warmed up and reported.

An engine's own folder beside this one holds its hooks, its flags and the names of its parameters.
"""

from __future__ import annotations

from eprt.errors import ConfigError
from eprt.support import version_key


def version_warning(engine: str, found: str, oldest: str, below: str, tested: tuple[str, ...]) -> str:
    """Returns what is worth a warning about an engine's version, or "".

    Raises:
        ConfigError: `found` isn't from `oldest` to below `below`, whose hooks were read.
    """
    said, key = " and ".join(tested), version_key(found)
    if not version_key(oldest) <= key < version_key(below):
        hooks = f"the plugin hooks into {engine} {oldest} to below {below}"
        raise ConfigError(f"{engine} {found}: {hooks} (tested: {said}); install one of these")
    return "" if key in map(version_key, tested) else f"{engine} {found}: tested with {said}"
