"""Garbage is collected once before graphs are captured, and not meanwhile."""

from __future__ import annotations

import gc

import pytest

from eprt.garbage import without_collections
from eprt.world import World


@pytest.fixture
def collections():
    """The generations that were collected so far."""
    found = []

    def note(phase, info):
        if phase == "start":
            found.append(info["generation"])

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)


class Captured:
    def warmup(self):
        with without_collections():
            [[i] for i in range(10_000)]  # what would be collected


def test_a_warm_up_of_several_layers_collects_once(collections):
    with World.from_env("cpu") as world:
        gc.collect()
        collections.clear()
        world.warmup(Captured(), Captured(), Captured())
        assert collections.count(2) == 1
        assert collections[0] == 2, "before anything was captured"
    assert gc.isenabled()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_callers_setting_comes_back(collections, enabled):
    @without_collections()
    def captured():
        seen.append((collections[-1], gc.isenabled()))
        raise KeyError

    seen = []
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(KeyError):
            captured()
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
    assert seen == [(2, False)]
