"""The files of ours that one warm call of a layer enters: a reader opens as many to follow a token."""

from __future__ import annotations

from support.jobs import layer_jobs as jobs


def test_none_and_torch_grouped(pools) -> None:
    """On the pretended GPU `test_host_cost.py` counts them for symm and triton_grouped."""
    for files in pools(2).run(jobs.files_entered):
        assert len(files) <= 20, files
