"""The most memory of each GPU that was in use while something ran, of all processes together."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

QUERY = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits", "-lms", "100"]


@contextmanager
def watched(on: bool = True) -> Iterator[list[int]]:
    """Gives a list that has MiB by GPU when the block has ended; it stays empty where `on` is false."""
    peaks: list[int] = []
    if not on:
        yield peaks
        return
    reader = subprocess.Popen(QUERY, stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    thread = threading.Thread(target=highest, args=(reader.stdout, peaks), daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        reader.kill()
        thread.join()
        reader.wait()


def highest(lines: Iterable[str], peaks: list[int]) -> None:
    """Raises `peaks` to the largest value of each GPU in lines of "index, MiB"."""
    for line in lines:
        index, used = (int(cell) for cell in line.split(","))
        peaks.extend([0] * (index + 1 - len(peaks)))
        peaks[index] = max(peaks[index], used)
