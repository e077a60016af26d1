"""`eprt bench router` where there is no GPU: what it would measure, its refusals, its tables."""

from __future__ import annotations

import json

import pytest
import torch

from eprt.bench import router as bench
from eprt.bench.experts import Ceilings
from eprt.cli import main
from eprt.errors import ConfigError


def test_routers_are_of_the_models_sizes_and_more_than_a_cache_holds():
    shape = bench.SHAPES["deepseek-v4-flash-hash"]
    routers = bench._routers(shape, torch.device("cpu"))
    assert sum(router.weight.nbytes for router in routers) > bench.CACHE_BYTES
    assert routers[0].weight.shape == (shape.num_experts, shape.hidden_size)
    assert routers[0].token_table.shape == (bench.VOCABULARY, shape.top_k)
    assert not torch.equal(routers[0].weight, routers[1].weight)


def test_refusals(monkeypatch):
    with pytest.raises(ConfigError, match="expected one of gpt-oss-120b"):
        bench.router_report(["gpt"], tokens=[1])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device"):
        bench.router_report(tokens=[1])
    assert main(["bench", "router", "--tokens", "0"]) == 2


def test_table_and_json(monkeypatch, tmp_path, capsys):
    """Both routers are called with the same hidden states; times are made up."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "device", lambda *_: "cpu")
    monkeypatch.setattr(Ceilings, "measure", classmethod(lambda cls, _: cls(1e12, 1e15)))
    monkeypatch.setattr("eprt.bench.report.provenance", dict)
    monkeypatch.setattr(bench, "HOST_CALLS", 1)
    monkeypatch.setattr(bench, "CACHE_BYTES", 1)
    calls = []
    monkeypatch.setattr(bench, "device_microseconds", lambda *given, **_: calls.append(given) or 7.0 * len(calls))
    path = tmp_path / "router.json"
    assert main(["bench", "router", "--tokens", "3", "--shapes", "gpt-oss-120b", "--output", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["router"], row["tokens"], row["us"]) for row in rows] == [("eprt", 3, 7.0), ("torch", 3, 14.0)]
    assert rows[0]["weights_us"] == pytest.approx(2 * 131 * 2880 / 1e6, abs=0.01)
    assert "gpt-oss-120b" in capsys.readouterr().out
    ours, theirs = (given[0]() for given in calls)
    assert torch.equal(ours.ids, theirs.ids)
