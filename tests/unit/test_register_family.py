"""A family that a user wrote outside eprt."""

from __future__ import annotations

import pytest
from support.cases.model_cases import edit, equal, saved

import eprt
from eprt import ConfigError, ModelFamily, load_layer, register_family
from eprt.models import _REGISTERED, FAMILIES, family_for
from eprt.models.families import Qwen3Moe


class Own(Qwen3Moe):
    """Qwen3-MoE's layer; the router has another name."""

    routers = ("chooser",)


class Other(Own):
    pass


class Incomplete(ModelFamily):
    pass


@pytest.fixture(autouse=True)
def _forget():
    before = dict(_REGISTERED)
    yield
    _REGISTERED.clear()
    _REGISTERED.update(before)


def test_its_checkpoint_is_read(tmp_path):
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


def test_twice_is_once_and_errors_list_it():
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
        ("qwen3_moe", Own, "'qwen3_moe' is eprt.models.families:Qwen3Moe already"),
        ("new", Incomplete, "Incomplete of 'new' doesn't define moe_config, moe_layers"),
        ("new", Own(), "expected a subclass of eprt.models.ModelFamily"),
        ("new", dict, "expected a subclass of eprt.models.ModelFamily"),
        ("", Own, "model_type ''"),
        (None, Own, "model_type None"),
    ],
)
def test_clashes(model_type, family, text):
    register_family("taken", Own)
    with pytest.raises(ConfigError, match=text):
        register_family(model_type, family)
    assert set(_REGISTERED) == {"taken"}
    assert "taken" not in FAMILIES
