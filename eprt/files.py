"""Writes files that a user names, perhaps in a folder that others write into, too."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from eprt.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_whole(path: Path, content: str | bytes) -> None:
    """Replaces a file at once, so that a reader sees the old content or the new one. Makes its folder.

    A link is followed where this user or root made it; of anybody else it is replaced. What has other names, by hard
    links, keeps its content under them. Raises OSError, which names the path.
    """
    data, strangers = content.encode() if isinstance(content, str) else content, is_strangers_link(path)
    with named(path):
        if path.exists() and not path.is_file() and not strangers:  # /dev/stdout; a pipe's own name leads nowhere
            path.write_bytes(data)
            return
        path = path.parent.resolve() / path.name if strangers else path.resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")
        try:
            with beside.open("xb") as file:  # nobody can have put a link there that leads into another file
                file.write(data)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


def require_writable(path: Path) -> None:
    """Raises OSError where `write_whole` couldn't write: before what it is to hold is made."""
    with named(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.is_file() or not path.exists():  # not /dev/stdout
            with TemporaryFile(dir=next(folder for folder in path.resolve().parents if folder.exists())):
                pass


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Lets an OSError of the block name the path that the user gave: one of a full disk names none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def is_strangers_link(path: Path) -> bool:
    """Tells whether the path is a link that neither this user nor root made."""
    return path.is_symlink() and path.lstat().st_uid not in (os.geteuid(), 0)


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty picture, in inches. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'eprt[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a picture in the format that the file's name says. Raises ConfigError where it can't be written."""
    try:
        write_whole(path, drawn(figure, path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def drawn(figure: Figure, path: Path, flag: str = "") -> bytes:
    """Returns the content of the file that `save_figure` writes. Raises ConfigError, which begins with the `flag` that
    named the file, for a format that isn't known."""
    content = BytesIO()
    try:
        figure.savefig(content, format=path.suffix.removeprefix(".") or None)
    except ValueError as error:
        raise ConfigError(f"{flag}{path}: {error}") from error
    return content.getvalue()
