"""The tuning cache keeps on disk what a tuner found.

A result is one small JSON file under the user's cache folder, found again by everything it depends on: GPU name,
library and its version, problem. Files are written beside their place and renamed into it, so a reader never sees half
of one and processes that tune the same thing at the same time only repeat work. A file that can't be used is reported,
removed and made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_RESULT_BYTES = 1 << 20


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/eprt`, by default `~/.cache/eprt` (XDG Base Directory specification). Not created here."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eprt"


class TuningCacheWarning(UserWarning):
    """A cache file was unusable, or couldn't be written; tuning runs again."""


@dataclass(frozen=True)
class TuningCache:
    """Results of one tuner.

    Attributes:
        tuner: what tuned, e.g. `humming`; a folder name.
        version: of the library whose kernels were tuned.
        gpu: the device's name.
        root: folder that holds all tuners' folders.
    """

    tuner: str
    version: str
    gpu: str
    root: Path

    def path(self, problem: Mapping[str, Any]) -> Path:
        """The file of one problem: a readable folder, a hash of the whole key."""
        digest = hashlib.sha256(json.dumps(self._key(problem), sort_keys=True).encode()).hexdigest()[:24]
        return self.root / f"{self.tuner}-{self.version}" / f"{digest}.json"

    def load(self, problem: Mapping[str, Any], accept: Callable[[Any], bool] = lambda _: True) -> Any:
        """The stored result, or None. A file that is corrupt, foreign, not a regular one of this user or holds a result
        that isn't accepted is removed with a TuningCacheWarning.

        Args:
            accept: whether this could be a result of tuning here: it goes to a kernel.
        """
        path = self.path(problem)
        try:
            content = json.loads(_read_own(path))
            if content["key"] != self._key(problem):
                reason = "it belongs to another key"
            elif not accept(content["result"]):
                reason = "its result is none that tuning here could find"
            else:
                return content["result"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"
        warnings.warn(f"tuning cache {path} is unusable ({reason}); tuning again", TuningCacheWarning, stacklevel=2)
        with suppress(OSError):  # a folder, or not ours to remove
            path.unlink(missing_ok=True)
        return None

    def store(self, problem: Mapping[str, Any], result: Any) -> None:
        """Keep a JSON-able result. A folder that can't be written costs a warning, not the run."""
        path = self.path(problem)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
                json.dump({"key": self._key(problem), "result": result}, file)
            os.replace(file.name, path)
        except OSError as error:
            warnings.warn(f"tuning cache {path} can't be written: {error}", TuningCacheWarning, stacklevel=2)

    def _key(self, problem: Mapping[str, Any]) -> dict[str, Any]:
        # Through JSON, so that a tuple equals the list that is read back.
        return json.loads(
            json.dumps({"tuner": self.tuner, "version": self.version, "gpu": self.gpu, "problem": dict(problem)})
        )


def _read_own(path: Path) -> bytes:
    """A regular file of this user that nobody else can write: no pipe that would never end, no device, no link."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("not a regular file")
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise ValueError(f"user {found.st_uid} owns it, mode {stat.filemode(found.st_mode)}: others could write it")
        content = file.read(MAX_RESULT_BYTES + 1)
    if len(content) > MAX_RESULT_BYTES:
        raise ValueError(f"over {MAX_RESULT_BYTES} bytes")
    return content


def tuning_cache(tuner: str, version: str, gpu: str) -> TuningCache:
    """The cache of a tuner in the user's cache folder."""
    return TuningCache(tuner, version, gpu, cache_dir())
