"""Hooks into vLLM's worker, which calls no layer where it replays a graph of the whole model, and puts models to
sleep."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from eprt.errors import UsageError
from eprt.integrations.engine.sleeping import Kept
from eprt.integrations.engine.state import EngineState
from eprt.integrations.vllm.checking import with_experts, zero_experts
from eprt.integrations.vllm.routing import take_over_gates

ASLEEP = "its experts were given away (sleep level 2): load all weights before the next call"
WEIGHTS = "weights"  # the tag of what the allocator holds of a model


def watch_worker(state: EngineState) -> None:
    """Lets `state` look after its layers around what this process's worker does. Idempotent."""
    worker: Any = getattr(sys.modules.get("vllm.v1.worker.gpu_worker"), "Worker", None)  # the CPU worker's parent, too
    # Trainers call the allocator past the worker (SkyRL); it is loaded before any layer where sleep is enabled.
    allocator: Any = getattr(sys.modules.get("vllm.device_allocator.cumem"), "CuMemAllocator", None)
    kept = Kept()

    def after_loading(worker: Any) -> None:
        draft = getattr(worker.model_runner, "drafter", None) or getattr(worker.model_runner, "speculator", None)
        for model in (worker.get_model(), getattr(draft, "model", None)):
            if model is not None:
                take_over_gates(model)

    def before_step(worker: Any, scheduler_output: Any = None) -> None:
        # A dummy batch has no output of the scheduler, and runs the model as its peers do.
        tokens = 1 if scheduler_output is None else scheduler_output.total_num_scheduled_tokens
        state.before_step(forward=tokens > 0 or _fills_empty_steps(worker.vllm_config.parallel_config))

    def before_sleep(_: Any, offload_tags: tuple[str, ...] | str | None = None) -> None:
        if WEIGHTS not in ((offload_tags,) if isinstance(offload_tags, str) else offload_tags or ()):
            put_to_sleep(state, kept, lost_in_sleep())

    def before_checksums(_: Any) -> None:
        state.before_step(forward=False)  # what was loaded last may still lie in parameters

    def after_waking(_: None, allocator: Any, tags: list[str] | None = None) -> None:
        if tags is None or WEIGHTS in tags:
            kept.restore()

    # vLLM asks for this after loading and before its first forward, which it compiles.
    _surround(worker, "get_kv_cache_spec", before=after_loading)
    for name in ("execute_model", "execute_dummy_batch"):
        _surround(worker, name, before=before_step)
    for name in ("save_sharded_state", "save_tensorized_model"):
        _surround(worker, name, before=partial(_require_no_experts, state))
    _surround(worker, "checkpoint_prepare", before=partial(_require_nothing_shared, state))
    _surround(worker, "compute_weight_checksums", before=before_checksums, after=with_experts)
    _surround(worker, "reset_weights", before=zero_experts)
    _surround(allocator, "sleep", before=before_sleep)
    _surround(allocator, "wake_up", after=after_waking)


def put_to_sleep(state: EngineState, kept: Kept, lost: Callable[[torch.Tensor], bool]) -> None:
    """Keeps the tensors of which `lost` is true, less the experts; calls are refused until those are loaded."""
    kept.save(state.built, lost)
    for layer in state.built:
        layer.refuse_calls(f"layer {layer.dispatcher.layer}: {ASLEEP}")


def watch_config(begin: Callable[[Any], None], end: Callable[[Any], None]) -> None:
    """Lets `begin` have a worker's VllmConfig before the worker builds its model, and `end` when it has ended.
    Idempotent."""
    wrapper: Any = getattr(sys.modules.get("vllm.v1.worker.worker_base"), "WorkerWrapperBase", None)

    def before_init(worker: Any) -> None:
        begin(worker.vllm_config)

    def after_shutdown(_: None, worker: Any) -> None:
        end(getattr(worker, "vllm_config", None))

    _surround(wrapper, "init_device", before=before_init)
    _surround(wrapper, "shutdown", after=after_shutdown)


def _fills_empty_steps(parallel: Any) -> bool:
    """Returns whether the model runs in steps for which nothing was scheduled (`gpu_model_runner.py`: a dummy run)."""
    return parallel.distributed_executor_backend == "external_launcher" and parallel.data_parallel_size > 1


def _require_no_experts(state: EngineState, *_: Any, **__: Any) -> None:
    """Raises UsageError before vLLM saves a model whose experts are eprt's: it leaves freed parameters out."""
    if count := len(state.built):
        raise UsageError(
            f"eprt holds the experts of {count} layers, and what vLLM saves would lack them: save it from an engine "
            "that runs with VLLM_PLUGINS=none"
        )


def _require_nothing_shared(state: EngineState, *_: Any, **__: Any) -> None:
    """Raises UsageError before vLLM's process is stored (since 0.32), with what eprt's ranks share left out."""
    if ranks := max((world.size for world in state.worlds.values()), default=1) - 1:
        raise UsageError(
            f"this process shares eprt's buffers with {ranks} others, and a stored one would lack them: store an "
            "engine without --enable-expert-parallel, or one that runs with VLLM_PLUGINS=none"
        )


def lost_in_sleep() -> Callable[[torch.Tensor], bool]:
    """Returns whether a tensor lies in memory that vLLM gives away at sleep level 2: its "weights" pool."""
    from vllm.device_allocator.cumem import CuMemAllocator

    held = CuMemAllocator.get_instance().pointer_to_data
    ranges = [(start, start + data.handle[1]) for start, data in held.items() if data.tag == WEIGHTS]
    return lambda tensor: any(start <= tensor.data_ptr() < end for start, end in ranges)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _unchanged(result: Any, *_: Any, **__: Any) -> Any:
    return result


def _surround(
    owner: Any, name: str, before: Callable[..., None] = _nothing, after: Callable[..., Any] = _unchanged
) -> None:
    """Lets a method of a class call `before` with its own arguments, and return what `after` makes of its result and
    these."""
    inner = getattr(owner, name, None)
    if inner is None or hasattr(inner, "eprt"):
        return

    @functools.wraps(inner)
    def surrounded(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        return after(inner(*args, **kwargs), *args, **kwargs)

    surrounded.eprt = True  # type: ignore[attr-defined]
    setattr(owner, name, surrounded)
