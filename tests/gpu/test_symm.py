"""What the symmetric-memory dispatcher has by itself: NaN for a dropped call, kernels that notice a wrong R and a late
peer."""

from __future__ import annotations

from support.cases.gpu_ranks import SIZE, launch_here, several_gpus
from support.jobs import library_jobs
from support.jobs import lost_rank_jobs as jobs
from support.jobs.dispatcher_jobs import SYMM

pytestmark = several_gpus


def test_a_call_that_one_rank_drops_is_nan_where_it_was_asked():
    found = launch_here(library_jobs.one_rank_drops_a_call, timeout_s=180, pair=SYMM)
    assert found == [(True, 0)] * SIZE


def test_unequal_rows_are_noticed_without_validation():
    for kind, text in launch_here(jobs.unequal_rows_unchecked, timeout_s=180, pair=SYMM):
        assert (kind, "tokens_per_rank differs" in text) == ("WorldMismatch", True)


def test_a_rank_that_comes_too_late_is_named_in_bounded_time():
    found = launch_here(jobs.one_rank_is_late, timeout_s=180, pair=SYMM, limit_s=3.0)
    for rank, (kind, text, seconds) in enumerate(found):
        if rank != jobs.VICTIM:
            assert (kind, f"rank {jobs.VICTIM} silent" in text) == ("RankLost", True)
            assert seconds < 3.0 + 2.0  # five good steps come before
