"""A backend or a model family is one class and one row: the classes are in this file, the rows are registered here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from support.cases import expert_cases as cases
from support.cases.model_cases import equal, saved
from support.cases.packed_checkpoints import edit

import eprt
from eprt import ConfigError, ModelFamily, engines, load_layer, register_dispatcher, register_executor, register_family
from eprt.config import RuntimeConfig
from eprt.conformance.oracle import relative_error
from eprt.dispatch import DISPATCHERS, Dispatched, Dispatcher, DispatcherSpec, Handle
from eprt.engines import Engine, EngineSpec
from eprt.errors import InputError, UnsupportedError, UsageError
from eprt.experts import EXECUTORS
from eprt.experts.base import ExecutorSpec
from eprt.experts.reference import ReferenceExecutor
from eprt.layer import ExpertParallelMoE
from eprt.models import _REGISTERED, FAMILIES, family_for
from eprt.models.families import Qwen3Moe
from eprt.support import Support
from eprt.tokens import FlatTokens, Payload, RouterLogits, TopK
from eprt.world import World


class Mirror(Dispatcher):
    """Sends the rows in the other order, which combine must undo."""

    def _dispatch(self, hidden: Payload, topk: TopK, handle: Handle) -> FlatTokens:
        flipped = Payload(hidden.data.flip(0), hidden.format)
        return FlatTokens(flipped, topk.ids.flip(0), topk.weights.flip(0), self.config.num_experts, every_row_read=True)

    def _combine(self, expert_output: torch.Tensor, handle: Handle) -> torch.Tensor:
        return expert_output.flip(0).to(handle.dtype)


class Counting(ReferenceExecutor):
    calls = 0

    def _flat(self, tokens: FlatTokens, out: torch.Tensor) -> None:
        type(self).calls += 1
        super()._flat(tokens, out)


MIRROR = DispatcherSpec(
    name="mirror", path=f"{__name__}:Mirror", summary="a test's", formats=("flat",), payloads=("bf16", "f32"),
    devices=("cpu",), graph_safe=False, max_ranks=1,
)  # fmt: skip
COUNTING = ExecutorSpec(
    name="counting", path=f"{__name__}:Counting", summary="a test's", formats=("flat",), weights=("f32",),
    devices=("cpu",),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    tables = (DISPATCHERS, EXECUTORS, _REGISTERED)
    before = [dict(table) for table in tables]
    yield
    for table, rows in zip(tables, before, strict=True):
        table.clear()
        table.update(rows)


@pytest.mark.parametrize("names", [("mirror", "counting"), ("auto", "counting"), ("mirror", "auto"), ("auto", "auto")])
def test_a_new_row_is_enough(monkeypatch, names: tuple[str, str]) -> None:
    register_dispatcher(MIRROR)
    register_executor(COUNTING)
    monkeypatch.setattr(Counting, "calls", 0)
    config = cases.make_config("f32")
    weights, flat = cases.make_weights(config), cases.make_flat(config, 7)
    with World.from_env("cpu") as world:
        layer = ExpertParallelMoE(config, world, weights, runtime=RuntimeConfig(*names))
        plain = ExpertParallelMoE(config, world, weights, runtime=RuntimeConfig("none", "reference"))
        if names == ("auto", "auto"):
            assert ("mirror", "counting") in {(c.dispatcher, c.executor) for c in layer.plan.candidates}
        seen: list[tuple[str, object]] = []
        layer.see = lambda phase, found: seen.append((phase, found))
        topk = TopK(flat.ids, flat.weights)
        found = layer(flat.hidden.data, topk)
        assert relative_error(found, plain(flat.hidden.data, topk)) < 1e-5
        layer(flat.hidden.data, RouterLogits(torch.randn(7, config.num_experts)))
    # Rows that say no preference are the last choice where others can.
    assert layer.plan.dispatcher == ("none" if names[0] == "auto" else names[0])
    assert layer.plan.executor == ("torch_grouped" if names[1] == "auto" else names[1])
    assert Counting.calls == (2 if names[1] == "counting" else 0)
    # What the layer chose and sent is seen from outside, without its private parts.
    assert [phase for phase, _ in seen] == ["route", "dispatch"] * 2
    assert seen[0][1] is topk
    assert isinstance(seen[1][1], Dispatched)
    assert seen[1][1].handle.num_tokens == 7
    assert isinstance(seen[2][1], TopK)


def test_what_a_new_row_refuses_is_in_the_table() -> None:
    register_executor(COUNTING)
    config = cases.make_config("bf16")
    weights, runtime = cases.make_weights(config), RuntimeConfig(executor="counting")
    with World.from_env("cpu") as world, pytest.raises(UnsupportedError, match="takes f32 weights, not bf16"):
        ExpertParallelMoE(config, world, weights, runtime=runtime)


def test_registering_an_equal_row_again_changes_nothing() -> None:
    for _ in range(2):
        register_dispatcher(replace(MIRROR))
    assert DISPATCHERS["mirror"] == MIRROR


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (replace(MIRROR, path="other:Mirror"), r"'mirror' is .*:Mirror already, not other:Mirror"),
        (replace(MIRROR, name="symm"), r"'symm' is eprt\.dispatch\.symm:SymmetricMemoryDispatcher already"),
        (replace(MIRROR, name="other"), r":Mirror is 'mirror' already: register a subclass of it as 'other'"),
        (replace(MIRROR, name="auto"), "name 'auto': expected a name of its own"),
        (replace(MIRROR, path="mirror"), "path 'mirror': expected 'module:Class'"),
        (replace(MIRROR, formats=("flt",)), "formats names 'flt': choose from flat, expert_major"),
        (replace(MIRROR, devices=()), "devices names nothing: choose from cpu, cuda"),
        (COUNTING, "is a ExecutorSpec: expected a DispatcherSpec"),
    ],
)
def test_a_row_that_cannot_be_registered(row: DispatcherSpec, text: str) -> None:
    register_dispatcher(MIRROR)
    before = dict(DISPATCHERS)
    with pytest.raises(ConfigError, match=text):
        register_dispatcher(row)
    assert before == DISPATCHERS


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("no.such:Thing", "no.such can't be imported"),
        (f"{__name__}:MIRROR", "expected a subclass of Dispatcher"),
        ("eprt.dispatch:Dispatcher", "doesn't define _combine, _dispatch"),
    ],
)
def test_a_row_without_its_class(path: str, text: str) -> None:
    register_dispatcher(replace(MIRROR, path=path))
    config = cases.make_config("f32")
    runtime = RuntimeConfig("mirror", "reference")
    with World.from_env("cpu") as world, pytest.raises(ConfigError, match=text):
        ExpertParallelMoE(config, world, cases.make_weights(config), runtime=runtime)


class Fused(Engine):
    """Dispatch, experts and combine in one, by the definition: every expert's function on every rank's own tokens."""

    calls: list[tuple[int, int]] = []  # noqa: RUF012

    def takes(self, x: torch.Tensor, choice: TopK | RouterLogits, tokens_per_rank: int | None) -> bool:
        return isinstance(choice, TopK)

    def begin(self, inside: torch.Tensor, choice: TopK | RouterLogits, rows: int):
        self.calls.append((inside.shape[0], rows))
        return inside, choice

    def compute(self, work) -> torch.Tensor:
        inside, topk = work
        config = self.parts.config
        tokens = FlatTokens(Payload.plain(inside), topk.ids, topk.weights, config.num_experts, every_row_read=True)
        return self.parts.executor(tokens)

    def finish(self, y: torch.Tensor, work) -> torch.Tensor:
        return y


def test_a_fused_engine_is_one_row(monkeypatch) -> None:
    """Checks, agreement, capacity and rounds stand before it; it is given what they let through."""
    row = EngineSpec("fused", f"{__name__}:Fused", "all in one", lambda *_: Support(True, "calls with a TopK"))
    monkeypatch.setattr(engines, "ENGINES", {"fused": row, **engines.ENGINES})
    Fused.calls.clear()
    config = cases.make_config("f32")
    weights, flat = cases.make_weights(config), cases.make_flat(config, 7)
    x, topk, phases = flat.hidden.data, TopK(flat.ids, flat.weights), []
    with World.from_env("cpu") as world:
        fused = ExpertParallelMoE(config, world, weights, runtime=RuntimeConfig("none", "reference", 3))
        assert list(fused.plan.engines) == ["fused", "kernel_routed", "split"]
        monkeypatch.undo()
        split = ExpertParallelMoE(config, world, weights, runtime=RuntimeConfig("none", "reference"))
        monkeypatch.setattr(fused.dispatcher, "_dispatch", lambda *_: pytest.fail("a dispatcher was used"))
        fused.observe = lambda phase: phases.append(phase) or torch.no_grad()
        assert relative_error(fused(x, topk), split(x, topk)) < 1e-5
        assert Fused.calls == [(3, 3), (3, 3), (1, 1)]
        assert phases == [
            "route", "dispatch", "experts", "shared", "combine", *["dispatch", "experts", "combine"] * 2
        ]  # fmt: skip
        with pytest.raises(InputError, match="expected int32"):
            fused(x, TopK(topk.ids.long(), topk.weights))
        fused.close()
        with pytest.raises(UsageError, match="closed"):
            fused(x, topk)
    assert len(Fused.calls) == 3


class Own(Qwen3Moe):
    """Qwen3-MoE's layer; the router has another name."""

    routers = ("chooser",)


class Other(Own):
    pass


class Incomplete(ModelFamily):
    pass


def test_a_checkpoint_of_a_registered_family_is_read(tmp_path):
    _, block, layer, folders = saved("qwen3_moe")
    source = edit(
        folders["original"],
        tmp_path,
        lambda held: {name.replace(".mlp.gate.weight", ".mlp.chooser.weight"): t for name, t in held.items()},
        {"model_type": "own_moe"},
    )
    with pytest.raises(ConfigError, match=r"'own_moe' is not supported.*eprt.register_family adds one"):
        load_layer(source, layer)
    register_family("own_moe", Own)
    parts = load_layer(source, layer)
    equal(parts.router.weight, block.gate.weight.data)
    equal(parts.experts.down.data, block.experts.down_proj.data)


def test_a_family_registered_twice_is_one_and_errors_list_it():
    register_family("own_moe", Own)
    register_family("own_moe", Own)
    assert type(family_for({"model_type": "own_moe"})) is Own
    assert eprt.register_family is register_family
    with pytest.raises(ConfigError, match=r"own_moe; eprt\.register_family"):
        family_for({"model_type": "llama"})


@pytest.mark.parametrize(
    ("model_type", "family", "text"),
    [
        ("taken", Other, r"'taken' is .*:Own already, not .*:Other: register one of them"),
        ("qwen3_moe", Own, "'qwen3_moe' is eprt.models.families:Qwen3Moe already, .* give yours another name"),
        ("new", Incomplete, "Incomplete of 'new' doesn't define moe_config, moe_layers"),
        ("new", Own(), "expected a subclass of eprt.models.ModelFamily"),
        ("new", dict, "expected a subclass of eprt.models.ModelFamily"),
        ("", Own, "model_type ''"),
        (None, Own, "model_type None"),
    ],
)
def test_a_family_that_cannot_be_registered(model_type, family, text):
    register_family("taken", Own)
    with pytest.raises(ConfigError, match=text):
        register_family(model_type, family)
    assert set(_REGISTERED) == {"taken"}
    assert "taken" not in FAMILIES
