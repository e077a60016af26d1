"""Who uses which part of a buffer that serves several calls."""

from __future__ import annotations

import torch

from eprt.errors import UsageError
from eprt.support import stream_number


class InFlightBuffers:
    """Parts of a buffer that serve one dispatch/combine pair each. The lowest free one is next, hence the same one on
    ranks that make the same calls.

    Args:
        count, what: how many, and whose they are.
        device: where the buffer is, whose streams use it.
    """

    def __init__(self, count: int, what: str, device: torch.device) -> None:
        self.count = count
        self._what = what
        self._device = device
        self._free = set(range(count))
        self._on_gpu = device.type == "cuda"
        self._last_stream: dict[int, tuple[int, torch.cuda.Stream]] = {}  # with its number, which is asked for faster

    def require_free(self) -> None:
        """Raises UsageError if every buffer is in use."""
        if not self._free:
            raise UsageError(
                f"{self._what}: {self.count} dispatches of this geometry are open, which is the limit: combine or "
                "close one before the next dispatch"
            )

    def acquire(self) -> int:
        """Raises UsageError if every buffer is in use."""
        self.require_free()
        index = min(self._free)
        last = self._last_stream.get(index)
        if last is not None and last[0] != stream_number(self._device):
            self._follow(last[1])
        self._free.remove(index)
        return index

    def reset(self) -> None:
        """All are free: the calls that hold them were given up."""
        self._free = set(range(self.count))
        self._last_stream.clear()

    def release(self, index: int) -> None:
        if self._on_gpu:
            last = self._last_stream.get(index)
            if last is None or last[0] != stream_number(self._device):
                stream = torch.cuda.current_stream(self._device)
                self._last_stream[index] = stream.cuda_stream, stream
        self._free.add(index)

    def _follow(self, last: torch.cuda.Stream) -> None:
        """A buffer is reused in stream order. Work of another stream is waited for, unless exactly one of the two is
        being captured: then the order of replay and eager calls is the caller's."""
        current = torch.cuda.current_stream(self._device)
        if _captures(last) == _captures(current):
            current.wait_stream(last)


def _captures(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
