"""An event loop in a thread of its own, which other threads hand work to and wait for no longer than they like."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable


class LoopThread:
    """The loop is `loop`; `begin` is called in it first."""

    def __init__(self, name: str, begin: Callable[[], None]) -> None:
        self.loop = asyncio.new_event_loop()
        self._begin = begin
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def here(self) -> bool:
        """Whether the caller is this thread."""
        return threading.current_thread() is self._thread

    def do(self, call: Callable[[], None], wait_s: float = 1.0) -> None:
        """Have the thread do it, and wait for that a little: it must have happened before this process ends."""
        if not self.alive or self.here:
            return
        done = threading.Event()

        def run() -> None:
            try:
                call()
            finally:
                done.set()

        try:
            self.loop.call_soon_threadsafe(run)
        except RuntimeError:  # the loop ended in between
            return
        done.wait(wait_s)

    def stop(self) -> None:
        if self.alive:
            self.loop.call_soon_threadsafe(self.loop.stop)
        if self.alive and not self.here:
            self._thread.join(timeout=2.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.call_soon(self._begin)
            self.loop.run_forever()
            pending = asyncio.all_tasks(self.loop)  # what never came about
            for task in pending:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        finally:
            self.loop.close()
