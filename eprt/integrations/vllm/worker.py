"""Hooks into vLLM's worker, which calls no layer where it replays a graph of the whole model."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch

from eprt.integrations.engine.sleeping import Kept
from eprt.integrations.engine.state import EngineState


class TakesConfig(Protocol):
    """What reads a VllmConfig before the model is built."""

    def take_over_balancing(self, config: Any) -> None: ...


def watch_worker(state: EngineState) -> None:
    """Lets `state` look after its layers around what this process's worker does. Idempotent."""
    worker: Any = getattr(sys.modules.get("vllm.v1.worker.gpu_worker"), "Worker", None)  # the CPU worker's parent, too
    kept = Kept()

    def before_step(_: Any, scheduler_output: Any = None) -> None:
        # A dummy batch has no output of the scheduler, and runs the model as its peers do.
        state.before_step(forward=scheduler_output is None or scheduler_output.total_num_scheduled_tokens > 0)

    def before_sleep(_: Any, level: int = 1) -> None:
        if level == 2:
            kept.save(state.built, lost_in_sleep())

    def after_waking(_: Any, tags: list[str] | None = None) -> None:
        if tags is None or "weights" in tags:
            kept.restore()

    for name in ("execute_model", "execute_dummy_batch"):
        _surround(worker, name, before=before_step)
    _surround(worker, "sleep", before=before_sleep)
    _surround(worker, "wake_up", after=after_waking)


def watch_config(state: TakesConfig) -> None:
    """Takes `--enable-eplb` over before a worker builds its model, if eprt's layers may be in it. Idempotent."""
    wrapper: Any = getattr(sys.modules.get("vllm.v1.worker.worker_base"), "WorkerWrapperBase", None)

    def before_init(worker: Any) -> None:
        state.take_over_balancing(worker.vllm_config)

    _surround(wrapper, "init_device", before=before_init)


def lost_in_sleep() -> Callable[[torch.Tensor], bool]:
    """Returns whether a tensor lies in memory that vLLM gives away at sleep level 2: its "weights" pool."""
    from vllm.device_allocator.cumem import CuMemAllocator

    held = CuMemAllocator.get_instance().pointer_to_data
    ranges = [(start, start + data.handle[1]) for start, data in held.items() if data.tag == "weights"]
    return lambda tensor: any(start <= tensor.data_ptr() < end for start, end in ranges)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _surround(
    owner: Any, name: str, before: Callable[..., None] = _nothing, after: Callable[..., None] = _nothing
) -> None:
    """Lets a method of a class call `before` and `after` with its own arguments."""
    inner = getattr(owner, name, None)
    if inner is None or hasattr(inner, "eprt"):
        return

    @functools.wraps(inner)
    def surrounded(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        result = inner(*args, **kwargs)
        after(*args, **kwargs)
        return result

    surrounded.eprt = True  # type: ignore[attr-defined]
    setattr(owner, name, surrounded)
