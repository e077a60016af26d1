"""Makes temporary folders that don't outlive their process by much: the next process removes what a killed one left."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from eprt.errors import ConfigError

_PREFIX = "eprt-"
_LOCK = ".lock"
MAX_TMPDIR = 70  # characters: multiprocessing's sockets lie there, and Linux allows their names 108


class Scratch:
    """A temporary folder, locked as long as this process lives and removed by `close`.

    Raises:
        ConfigError: TMPDIR's name is too long for a socket's.
    """

    def __init__(self, what: str) -> None:
        root = tempfile.gettempdir()
        if len(root) > MAX_TMPDIR:
            raise ConfigError(
                f"the folder for temporary files, {root}, has {len(root)} characters: set TMPDIR to one of at most "
                f"{MAX_TMPDIR}"
            )
        sweep(Path(root))
        made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}{what}-"))  # a name that nobody's sweep takes
        self._lock: int | None = os.open(made / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.rename(made.with_name(made.name.removeprefix(".")))

    def close(self) -> None:
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def sweep(root: Path) -> None:
    """Removes this user's folders that no process holds any more."""
    for folder in root.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # not one of ours, not this user's, or gone
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)
