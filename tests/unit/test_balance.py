"""Counting experts' load, and what is made of the counts."""

from __future__ import annotations

import pytest
import torch
from support.jobs import balance_jobs as jobs

from eprt.balance import read_counts, write_counts, zipf
from eprt.errors import ConfigError
from eprt.load import ExpertLoad

E = jobs.E


# ---- counting ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [(), (*range(E), 3, 3, 0, 1)], ids=["plain", "replicas"])
def test_a_layer_counts_what_its_tokens_chose(pools, slots) -> None:
    found = pools(2).run(jobs.counted, slots=slots, steps=12)
    for counts, wanted, after, total in found:
        assert counts == wanted
        assert sum(counts) > 50
        assert after == 0
        assert total == [[a + b for a, b in zip(found[0][1], found[1][1], strict=True)]] * 2


def test_who_does_not_count_says_so(pools) -> None:
    for told in pools(2).run(jobs.not_counted):
        assert [text.partition(":")[0] for text in told] == ["UsageError"] * 3
        assert all("RuntimeConfig(count_load=True)" in text for text in told)


def test_ids_outside_are_not_counted_and_nothing_is_read() -> None:
    load = ExpertLoad(4, torch.device("cpu"))
    load.add(torch.tensor([[0, 3], [4, -1], [3, 9]], dtype=torch.int32))
    load.add(torch.empty(0, 2, dtype=torch.int32))
    before = load.read()
    assert before.tolist() == [1, 0, 0, 2]
    load.add(torch.tensor([[1, 1]], dtype=torch.int32))
    assert before.tolist() == [1, 0, 0, 2], "a copy"
    assert load.read().tolist() == [1, 2, 0, 2]


# ---- files ------------------------------------------------------------------------------------------------------


def test_counts_come_back_from_their_file(tmp_path) -> None:
    write_counts(tmp_path / "c.json", {3: [1, 2, 3], 7: torch.tensor([4, 5, 6])})
    assert read_counts(tmp_path / "c.json") == {3: (1, 2, 3), 7: (4, 5, 6)}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[", "is no file of expert counts"),
        ("[]", "expected an object with format"),
        ('{"format": "eprt expert counts", "version": 2}', "version 1"),
        ('{"format": "eprt expert counts", "version": 1, "layers": {}}', "missing or empty"),
        ('{"format": "eprt expert counts", "version": 1, "layers": {"x": [1]}}', "layer 'x'"),
        ('{"format": "eprt expert counts", "version": 1, "layers": {"1": [1, -1]}}', "layer 1: .*none negative"),
        ('{"format": "eprt expert counts", "version": 1, "layers": {"1": [1.5]}}', "layer 1"),
    ],
)
def test_what_is_no_file_of_counts(tmp_path, text: str, says: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_counts(path)
    with pytest.raises(ConfigError, match="is no file of expert counts"):
        read_counts(tmp_path / "none.json")


def test_zipf_is_what_it_says() -> None:
    assert zipf(3, 1.0, 1100) == (600, 300, 200)
    assert set(zipf(4, 0.0)) == {250_000}
    with pytest.raises(ConfigError, match="exponent -1"):
        zipf(4, -1.0)
