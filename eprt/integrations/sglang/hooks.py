"""Hooks into SGLang, through its own registry: who carries tokens, what a MoE layer becomes, when it is warmed up."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from eprt.errors import UsageError
from eprt.experts.in_place import by_slot
from eprt.integrations.engine.bound import BoundLayer, adopted, layers_of
from eprt.integrations.engine.parameters import FallsBackToEngine
from eprt.integrations.sglang.method import EprtFusedMoEMethod, pass_through
from eprt.integrations.sglang.parameters import layout_of
from eprt.integrations.sglang.routing import ask_for_ids, take_over_gates
from eprt.integrations.sglang.state import SglangState, name_of
from eprt.integrations.sglang.supported import (
    CARRIED,
    all_to_all_reason,
    chooses_prefill_graphs,
    compiles_prefill,
    keeps_prefill_graphs,
    require_supported,
)

_SRT = "sglang.srt."
_LAYER = "layers.moe.fused_moe_triton.layer."
EXPORT = "eprt holds the experts, which SGLang's export would lack: export from a server with SGLANG_PLUGINS=none"
PLACED = "eprt holds the experts where its 'placement' says: start the server again with new weights, or without it"
PAST = (
    "eprt holds the experts, and load_format '{}' would write into parameters, or add to them: send whole weights "
    "under the checkpoint's names without it"
)
BY_NAME = (None, "flattened_bucket")  # what SGLang gives to a model's own loader as it came
# Of dense models, of stages of a pipeline that are dense, and of Dbrx.
NONE = "eprt: no layer on this rank is one of SGLang's FusedMoE: nothing of it runs in eprt"
_SUMMED = "fuse_mlp_allreduce"  # SGLang's flag: what comes behind the block adds up its output


def install(state: SglangState) -> None:
    """Registers every hook; SGLang applies them when all plugins have run."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import ServerArgs

    def register(path: str, hook: Callable[..., Any], kind: Any = HookType.AROUND) -> None:
        HookRegistry.register(_SRT + path, hook, kind)

    register(_LAYER + "FusedMoE.__init__", partial(_layer_made, state), HookType.AFTER)
    if state.unfit:
        return  # the layers say so; names elsewhere are not touched
    loads = "model_executor.model_runner.ModelRunner.load_model"
    register(loads, partial(_loading, state), HookType.BEFORE)
    register(loads, partial(_loaded, state), HookType.AFTER)
    resolves = "resolve_once" if hasattr(ServerArgs, "resolve_once") else "__post_init__"  # the former since 0.5.23
    register(f"server_args.ServerArgs.{resolves}", partial(_arguments_made, state))
    register("layers.moe.utils.MoeA2ABackend.is_flashinfer", _carries_tokens)
    register(_LAYER + "create_moe_dispatcher", _dispatcher)
    register("eplb.expert_location_dispatch.ExpertLocationDispatchInfo.init_new", _experts_in_order)
    register("layers.moe.moe_runner.runner.MoeRunner.__init__", _runner_made)
    register("layers.moe.topk.TopK.__init__", partial(_router_made, state), HookType.AFTER)
    register("state_capturer.routed_experts.RoutedExpertsCapturer._get_local_slice", _recorded_rows)
    register("managers.scheduler.Scheduler.run_event_loop", partial(_served, state))
    for save in ("save_sharded_model", "save_remote_model"):
        register(f"managers.scheduler.Scheduler.{save}", partial(_saved, state))
    sender = "model_executor.model_runner_components.weight_exporter.WeightExporter."
    for send in ("init_weights_send_group_for_remote_instance", "send_weights_to_remote_instance"):
        register(sender + send, partial(_sent, state))
    manager = "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
    register(manager + "release_memory_occupation", partial(_released, state))
    register(manager + "resume_memory_occupation", partial(_resumed, state))
    updater = "model_executor.model_runner_components.weight_updater."
    register(updater + "_unsupported_derived_weight_cache_error", partial(_update_refused, state))
    register(updater + "WeightUpdater.update_weights_from_tensor", partial(_from_tensors, state))
    register("utils.weight_checker.WeightChecker._model_state", partial(_checked, state))
    register("model_executor.model_runner.ModelRunner.forward", partial(_before_forward, state), HookType.BEFORE)


def _arguments_made(state: SglangState, original: Callable[..., None], args: Any) -> None:
    """Gives eprt the exchange of tokens, where it can run every layer, before SGLang resolves its arguments."""
    if args.moe_a2a_backend == CARRIED or getattr(args, "_resolution_finished", False):
        original(args)
        return
    reason = all_to_all_reason(args, state.options())
    if not reason:
        args.moe_a2a_backend = CARRIED
    elif args.ep_size > 1:
        state.logger.warning("eprt: SGLang carries the tokens between ranks: %s", reason)
    try:
        require_supported(args)
    except FallsBackToEngine:
        original(args)
        return  # the layers will say so
    args.disable_shared_experts_fusion = True
    chosen = chooses_prefill_graphs(args)
    if not chosen and keeps_prefill_graphs(args):
        args.cuda_graph_backend_prefill = "breakable"
    original(args)
    if not chosen and compiles_prefill(args):  # SGLang's default for some models with images
        args.cuda_graph_config.prefill.backend = "disabled"


def _carries_tokens(original: Callable[..., bool], backend: Any) -> bool:
    """Makes models treat eprt as they treat FlashInfer's all-to-all.

    Each rank has its own tokens, nothing is summed behind the experts, shared experts are whole, and counts of all
    ranks are known: SGLang asks for all that by this one question.
    """
    return original(backend) or backend.is_customized()


def _dispatcher(original: Callable[..., Any], config: Any, **more: Any) -> Any:
    from sglang.srt.layers.moe import get_moe_a2a_backend

    return pass_through() if get_moe_a2a_backend().is_customized() else original(config, **more)


def _experts_in_order(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Says of no layer that its experts lie out of order. SGLang 0.5.17 looks that up under every all-to-all, in a
    table that GLM-4.5V hasn't got."""
    from sglang.srt.layers.moe import get_moe_a2a_backend

    return None if get_moe_a2a_backend().is_customized() else original(*args, **kwargs)


def _recorded_rows(original: Callable[..., Any], recorder: Any, *args: Any, **kwargs: Any) -> Any:
    """Finds this rank's rows where SGLang recorded the experts that its tokens chose (`return_routed_experts`).

    With data-parallel attention SGLang looks among the rows of all ranks, which its routers see unless DeepEP carries
    the tokens. Under eprt a router sees its rank's alone.
    """
    from sglang.srt.layers.moe import get_moe_a2a_backend
    from sglang.srt.state_capturer.base import BaseTopkCapturer

    find = BaseTopkCapturer._get_local_slice if get_moe_a2a_backend().is_customized() else original
    return find(recorder, *args, **kwargs)


def _runner_made(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Lets a layer be made whose runner (Marlin's, for INT4 and NVFP4) knows SGLang's own exchanges alone.

    eprt's method takes its place before it runs.
    """
    from sglang.srt.layers.moe import get_moe_a2a_backend

    try:
        original(*args, **kwargs)
    except NotImplementedError:
        if not get_moe_a2a_backend().is_customized():
            raise


def _router_made(state: SglangState, _: Any, topk: Any, *__: Any, **___: Any) -> None:
    state.top_k = topk.topk_config.top_k


def _layer_made(state: SglangState, _: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    """Puts eprt's method in front of the layer's own, whose parameters are declared already."""
    try:
        binding = state.bind(layer)
    except FallsBackToEngine as reason:
        state.leave(name_of(layer), str(reason))
        return
    method, bound = layer.quant_method, BoundLayer(state, binding)
    bound.declared(dict(layer.named_parameters(recurse=False)), layout_of(layer), layer)
    layer.quant_method = adopted(method, EprtFusedMoEMethod, bound)
    if binding.expert_parallel:
        _keep_sums_whole()


def _keep_sums_whole() -> None:
    """Keeps gpt-oss from adding up ranks' outputs: in SGLang 0.5.17 its block doesn't ask who carries the tokens.

    In 0.5.23 the block adds nothing up, and the flag is gone.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.runtime_context import get_forward

    if not hasattr(get_forward(), _SUMMED):
        return
    block = getattr(sys.modules.get(_SRT + "models.gpt_oss"), "GptOssSparseMoeBlock", None)
    path = _SRT + "models.gpt_oss.GptOssSparseMoeBlock.forward_normal"
    if block is None or path in HookRegistry._patched:
        return
    HookRegistry.register(path, _without_all_reduce, HookType.AROUND)
    HookRegistry.apply_hooks()


def _without_all_reduce(original: Callable[..., Any], block: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang.srt.runtime_context import get_forward

    with get_forward().scoped(**{_SUMMED: True}):
        return original(block, *args, **kwargs)


def _loading(state: SglangState, runner: Any, *_: Any, **__: Any) -> None:
    """Notes whose layers are made next."""
    state.architecture = next(iter(getattr(runner.model_config.hf_config, "architectures", None) or ()), "")
    state.drafts = runner.is_draft_worker


def _loaded(state: SglangState, _: Any, runner: Any, *__: Any, **___: Any) -> None:
    """Warms up as soon as a model is loaded, and its draft after it: SGLang gives what memory is left then to its KV
    cache."""
    take_over_gates(runner.model)
    ask_for_ids(runner.model)
    if state.cold:
        state.loaded()
    elif not state.bindings and state.reports():
        if state.fallbacks:
            state.report()
        else:
            state.logger.warning(NONE)


def _update_refused(state: SglangState, original: Callable[..., str | None], *args: Any, **kwargs: Any) -> str | None:
    """Tells SGLang, which asks before each update of weights, of experts that would have to go to other ranks then."""
    if any(binding.placement is not None for binding in state.bindings):
        return PLACED
    return original(*args, **kwargs)


def _from_tensors(
    state: SglangState,
    original: Callable[..., tuple[bool, str]],
    updater: Any,
    named_tensors: Any,
    load_format: str | None = None,
) -> tuple[bool, str]:
    """Refuses tensors for parameters as they are, which are gone: copies of the experts, and what a loader of the
    user's (`--custom-weight-loader`) may add, as verl's adds changes."""
    if state.bindings and load_format not in BY_NAME:
        return False, PAST.format(load_format)
    return original(updater, named_tensors, load_format)


def _released(state: SglangState, original: Callable[..., Any], manager: Any, request: Any) -> Any:
    if _of_weights(request):
        state.release()
    return original(manager, request)


def _resumed(state: SglangState, original: Callable[..., Any], manager: Any, request: Any) -> Any:
    result = original(manager, request)
    if _of_weights(request):
        state.kept.restore()
    return result


def _checked(state: SglangState, original: Callable[..., Any], checker: Any) -> Iterator[tuple[str, Any]]:
    """Shows SGLang's checker, by which trainers verify updates, the experts in place of parameters that are freed."""
    _before_forward(state)  # what came last may still lie in them
    yield from ((name, tensor) for name, tensor in original(checker) if tensor.numel())
    for name, layer in layers_of(checker._get_model()).items():
        executor: Any = layer.executor
        if by_slot(executor):
            yield from ((f"{name}.{part}", tensor) for part, tensor in executor.slot_tensors().items())


def _of_weights(request: Any) -> bool:
    return not request.tags or "weights" in request.tags


def _before_forward(state: SglangState, *_: Any, **__: Any) -> None:
    if state.unfinished:
        state.bring_in()


def _saved(state: SglangState, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Raises UsageError before SGLang saves a model whose experts are eprt's; its answer to who asked says so."""
    if state.bindings:
        raise UsageError(EXPORT)
    original(*args, **kwargs)


def _sent(state: SglangState, original: Callable[..., tuple[bool, str]], *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """Refuses to send a model whose experts are eprt's to another server, which would wait for them."""
    return (False, EXPORT) if state.bindings else original(*args, **kwargs)


def _served(state: SglangState, original: Callable[..., None], scheduler: Any) -> None:
    """Lets ranks agree on which of them is lost: SGLang ends all its processes as soon as a scheduler raises."""
    try:
        original(scheduler)
    except Exception:
        state.await_verdict()
        raise
