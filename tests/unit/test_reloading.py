"""What an engine's loaders write into a layer's parameters after eprt has freed them, from several threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from eprt.errors import CheckpointError
from eprt.integrations.engine.bound import BoundLayer
from eprt.integrations.engine.parameters import DENSE
from eprt.integrations.sglang.state import SglangState
from eprt.weights import Dense, Fp8Channel

E, ROWS = 8, 16


class Parameter(nn.Parameter):
    """As SGLang's and vLLM's with loaders of their own; SGLang's property has no setter."""

    @property
    def weight_loader(self) -> Any:
        return self._weight_loader


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = Parameter(torch.zeros(E, 2, ROWS), requires_grad=False)
        self.w2_weight = Parameter(torch.zeros(E, 1, ROWS), requires_grad=False)
        self.gate = threading.Barrier(1)
        for parameter in self.parameters():
            parameter._weight_loader = self.load

    def load(self, param: Any, loaded_weight: Any, weight_name: str, shard_id: str, expert_id: int) -> None:
        self.gate.wait()
        param.data[expert_id, int(shard_id == "w3")].copy_(loaded_weight)

    def _map_global_expert_id_to_local_expert_id(self, expert_id: int) -> int:
        return expert_id


def bound_to(layer: Experts) -> BoundLayer:
    """eprt's side of a layer whose first experts were taken, and its parameters freed."""
    world = SimpleNamespace(parallel=SimpleNamespace(ep_size=1))
    binding: Any = SimpleNamespace(name="layer", config=SimpleNamespace(num_experts=E), world=world)
    bound = BoundLayer(SglangState(), binding)
    bound.declared(dict(layer.named_parameters()), DENSE, layer)
    bound._module = lambda: layer
    for name, parameter in layer.named_parameters():
        bound._freed[name] = parameter.shape, parameter.dtype, parameter.device
        parameter.data = torch.empty(0)
    return bound


def load(layer: Experts, expert: int, shard: str) -> None:
    parameter = layer.w2_weight if shard == "w2" else layer.w13_weight
    parameter.weight_loader(parameter, torch.full((ROWS,), expert + 1.0), "name", shard, expert)


class Slow(dict[str, Any]):
    """Holds up whoever makes room: the first until a second comes along, if one does, and that one for longer."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(given)
        self.first, self.second = threading.Lock(), threading.Event()

    def __getitem__(self, name: str) -> Any:
        if self.first.acquire(blocking=False):
            self.second.wait(0.5)
        elif not self.second.is_set():
            self.second.set()
            time.sleep(0.5)
        return super().__getitem__(name)


def test_what_is_written_past_the_loaders_came_whole() -> None:
    """`weight_transfer/sharded_rdt_engine.py` since vLLM 0.32 calls them once, on meta, and writes by itself later."""
    layer = Experts()
    bound = bound_to(layer)
    bound.layer = built = Mock()
    for parameter in layer.parameters():
        parameter.data = torch.ones(E, 2, ROWS)
    bound.load(layer, replace(DENSE, unset=("w2_weight",)), interleaved=False)
    (given,) = built.load_experts.call_args.args
    assert given.down.data.eq(1).all()


def test_threads_that_load_at_once_lose_nothing() -> None:
    """As DeepSeek's models in SGLang do."""
    layer = Experts()
    bound = bound_to(layer)
    bound._freed = Slow(bound._freed)
    with ThreadPoolExecutor(2) as threads:
        every = [(e, shard) for e in range(E) for shard in ("w1", "w2", "w3")]
        list(threads.map(partial(load, layer), *zip(*every, strict=True)))
    for parameter in layer.parameters():
        assert torch.equal(parameter, torch.arange(1.0, E + 1)[:, None, None].expand_as(parameter))
    assert bound.state.unfinished == [bound]
    assert bound.received.complete


def test_a_part_has_come_when_it_is_written() -> None:
    """Another thread may make room then, and takes layers of which everything has come."""
    layer = Experts()
    bound = bound_to(layer)
    for e in range(E):
        for shard in ("w1", "w2", "w3") if e else ("w1", "w2"):
            load(layer, e, shard)
    layer.gate = threading.Barrier(2)
    last = threading.Thread(target=load, args=(layer, 0, "w3"), daemon=True)
    last.start()
    while not layer.gate.n_waiting:
        time.sleep(0.01)
    assert not bound.received.complete
    assert "local expert 0: w13_weight (w3)" in bound.lacking
    layer.gate.wait()
    last.join()
    assert bound.received.complete
    assert bound.lacking == ""


def test_a_loader_may_bring_all_of_a_ranks_experts_at_once() -> None:
    """vLLM's Llama-4 gives it three dimensions and the first expert's number."""
    layer = Experts()

    def load(param: Any, loaded_weight: Any, weight_name: str, shard_id: str, expert_id: int) -> None:
        param.data[:, int(shard_id == "w3")].copy_(loaded_weight[:, 0])

    for parameter in layer.parameters():
        parameter._weight_loader = load
    bound = bound_to(layer)
    for parameter, shards in ((layer.w13_weight, ("w1", "w3")), (layer.w2_weight, ("w2",))):
        for shard in shards:
            parameter.weight_loader(parameter, torch.ones(E, 1, ROWS), "weight", shard_id=shard, expert_id=0)
    assert bound.received.experts() == list(range(E))
    assert bound.received.complete


def test_dummy_weights_that_were_copied_say_nothing_of_an_experts_parts() -> None:
    """vLLM copies those of FP8 into the parameter; a trainer's have shards, of which none may lack then."""
    layer = Experts()
    bound = bound_to(layer)
    for parameter in layer.parameters():
        parameter.data = torch.empty(E, 2, ROWS)
        parameter.copy_(torch.ones(E, 2, ROWS))
    bound.received.forget()
    for shards, lacking in (("w1 w3 w2", ""), ("w1 w2", "w13_weight (w3)")):
        for e in range(E):
            for shard in shards.split():
                load(layer, e, shard)
        assert lacking in bound.lacking
        assert bound.received.complete == (not lacking)
        bound.received.forget()


@pytest.fixture
def undefined() -> Iterator[None]:
    """Memory that nobody has written holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("undefined")
def test_what_a_loader_leaves_out_is_zero_as_engines_declare_it() -> None:
    """gpt-oss's loader fills an eighth of 2880 columns into 384: of the last rank 192 are padding."""
    layer = Experts()
    for parameter in layer.parameters():
        parameter.data = parameter.data.to(torch.uint8)
    bound_to(layer)
    for e in range(E):
        parameter = layer.w13_weight
        parameter.weight_loader(parameter, torch.tensor(7), "name", "w1", e)
    assert layer.w13_weight[:, 0].eq(7).all()
    assert not layer.w13_weight[:, 1].any()


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_padding_of_memory_that_an_engine_made_anew_is_zero(byte: int) -> None:
    """vLLM's layerwise reload makes undefined parameters, which the same loader doesn't fill."""

    class Narrow(Experts):
        def load(self, param: Any, loaded_weight: Any, weight_name: str, shard_id: str, expert_id: int) -> None:
            param.data[expert_id, int(shard_id == "w3"), : ROWS // 2] = loaded_weight

    layer = Narrow()
    layer.w13_bias = Parameter(torch.zeros(E, 2, ROWS, dtype=torch.bfloat16), requires_grad=False)
    layer.w13_bias._weight_loader = layer.load
    for parameter in (layer.w13_weight, layer.w2_weight):
        parameter.data = parameter.data.to(torch.uint8)
    bound = bound_to(layer)
    bound.layer = built = Mock()
    for name, parameter in layer.named_parameters():
        shape, dtype, _ = bound._freed[name]
        parameter.data = torch.full((*shape[:-1], shape[-1] * dtype.itemsize), byte, dtype=torch.uint8).view(dtype)
    for e in range(E):
        for shard in ("w1", "w3"):
            for parameter in (layer.w13_weight, layer.w13_bias):
                parameter.weight_loader(parameter, torch.tensor(7), "name", shard, e)
        layer.w2_weight.weight_loader(layer.w2_weight, torch.tensor(7), "name", "w2", e)
    bound.load(layer, DENSE, interleaved=False)
    (given,) = built.load_experts.call_args.args
    for found in (given.gate_up.data, given.gate_up_bias):
        assert found[..., : ROWS // 2].eq(7).all()
        assert not found[..., ROWS // 2 :].any()


@pytest.mark.usefixtures("undefined")
def test_changes_alone_are_not_experts() -> None:
    """Trainers send NaN where nothing changed, and the rest replaces what a parameter holds (verl's `delta_loader.py`,
    NeMo-RL's `vllm_sparse_delta.py`). eprt has freed it."""
    changes = torch.full((ROWS,), float("nan"))
    changes[3] = 2.0

    class Merged(Experts):
        def load(self, param: Any, loaded_weight: Any, weight_name: str, shard_id: str, expert_id: int) -> None:
            held = param.data[expert_id, int(shard_id == "w3")]
            held.copy_(torch.where(changes.isnan(), held, changes))

    layer = Merged()
    bound = bound_to(layer)
    bound.layer = built = Mock()
    for e in range(E):
        for shard in ("w1", "w2", "w3"):
            load(layer, e, shard)
    with pytest.raises(CheckpointError, match=r"data of w13: some of its .* NaN; .*: send whole experts"):
        bound.load(layer, DENSE, interleaved=False)
    assert "holds old weights" in built.refuse_calls.call_args.args[0]


@pytest.mark.parametrize(("read", "refused"), [(True, True), (False, False)])
def test_scales_that_an_update_leaves_out_are_missed_where_they_are_read(read: bool, refused: bool) -> None:
    """An engine that began with dummy weights doesn't know what parts an expert has. SGLang declares scales, too, for
    experts that it quantises itself, and nobody writes them; so INT4's shapes in vLLM."""
    layer = Experts()
    for name in ("w13", "w2"):
        scale = Parameter(torch.ones(E, 2 if name == "w13" else 1, ROWS), requires_grad=False)
        scale._weight_loader = layer.load
        setattr(layer, f"{name}_weight_scale", scale)
    bound = bound_to(layer)
    bound.layer = built = Mock()
    for e in range(E):
        for shard in ("w1", "w2", "w3"):
            load(layer, e, shard)
    by_channel = replace(
        DENSE, matrices=lambda p: (Fp8Channel(p["w13_weight"], p["w13_weight_scale"]), Dense(p["w2_weight"]))
    )
    with pytest.raises(CheckpointError, match="scale of w13: some") if refused else nullcontext():
        bound.load(layer, by_channel if read else DENSE, interleaved=False)
    assert built.load_experts.called != refused


@pytest.mark.usefixtures("undefined")
@pytest.mark.parametrize("declared", ["by room", "anew"])
def test_biases_that_no_checkpoint_has_are_none_after_an_update(declared: str) -> None:
    """GPTQ's method declares them for every model. vLLM's layerwise reload makes undefined ones."""
    layer = Experts()
    layer.w13_bias = Parameter(torch.zeros(E, 2), requires_grad=False)
    layer.w13_bias._weight_loader = layer.load
    bound, layout = bound_to(layer), replace(DENSE, spare_biases=True)
    bound.layer = built = Mock()
    if declared == "anew":
        for name, parameter in layer.named_parameters():
            parameter.data = torch.empty(bound._freed[name][0])
    for e in range(E):
        for shard in ("w1", "w2", "w3"):
            load(layer, e, shard)
    bound.load(layer, layout, interleaved=False)
    (given,) = built.load_experts.call_args.args
    assert given.gate_up_bias is None
    assert given.down.data[:, 0, 0].tolist() == [e + 1.0 for e in range(E)]


def test_a_wrapped_loader_is_told_of_experts_too() -> None:
    """ROLL quantises to FP8 in a wrapper that passes on what it doesn't know."""
    layer = Experts()

    def wrapper(param: Any, loaded_weight: Any, *args: Any, **kwargs: Any) -> None:
        layer.load(param, loaded_weight, *args, **kwargs)

    for parameter in layer.parameters():
        parameter._weight_loader = wrapper
    bound = bound_to(layer)
    for shard, parameter in (("w1", layer.w13_weight), ("w2", layer.w2_weight), ("w3", layer.w13_weight)):
        parameter.weight_loader(parameter, torch.ones(ROWS), "name", shard_id=shard, expert_id=3)
    assert bound.received.experts() == [3]
    assert not bound.received.complete


@pytest.mark.parametrize("held", [[3], list(range(E))], ids=["one", "all"])
def test_a_parameter_that_keeps_all_ranks_experts_has_this_ranks_read(held: list[int]) -> None:
    """SGLang's NVFP4 has every rank's input scales loaded, the other ranks' while this rank's parameters are freed."""

    class Second(Experts):
        """The layer on the second of two ranks."""

        def _map_global_expert_id_to_local_expert_id(self, expert_id: int) -> int:
            return expert_id - E if expert_id >= E else -1

    def every(param: Any, loaded_weight: Any, weight_name: str, shard_id: str, expert_id: int) -> None:
        param.data[expert_id] = loaded_weight

    layer, read = Second(), {}
    layer.w2_input_scale = Parameter(torch.zeros(2 * E), requires_grad=False)
    layer.w2_input_scale._weight_loader = every
    layer.load = lambda param, loaded, name, shard, expert: Experts.load(layer, param, loaded, name, shard, expert - E)
    for parameter in (layer.w13_weight, layer.w2_weight):
        parameter._weight_loader = layer.load
    bound = bound_to(layer)
    bound.layer = built = Mock()
    built.placement.shard.return_value.experts = list(range(E, 2 * E))

    def canonical(given: Any) -> Any:
        return {name: tensor[E:] if len(tensor) == 2 * E else tensor for name, tensor in given.items()}

    def matrices(given: Any) -> Any:
        read.update(given)
        return DENSE.matrices(given)

    for e in [*range(E), *(E + row for row in held), 0]:
        layer.w2_input_scale.weight_loader(layer.w2_input_scale, torch.tensor(e + 1.0), "input_scale", "w2", e)
        for shard in ("w1", "w2", "w3") if e >= E else ():
            load(layer, e, shard)
    assert bound.received.experts() == held
    bound.load(layer, replace(DENSE, matrices=matrices), interleaved=False, canonical=canonical)
    assert read["w2_input_scale"].tolist() == [E + row + 1.0 for row in held]
    layer.w2_input_scale.weight_loader(layer.w2_input_scale, torch.tensor(1.0), "input_scale", "w2", 0)
    assert not layer.w2_input_scale.numel()
