"""The launcher finds every kind of failure, names the rank, shows every stack, leaves no process, and can pass."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from support.jobs import rank_jobs as jobs
from support.processes import Python, run_python, wait_until_gone

from eprt.errors import ConfigError, UsageError
from eprt.ranks import launcher
from eprt.ranks.launcher import WorldFailed, WorldPool, launch
from eprt.ranks.process import Raised
from eprt.ranks.stacks import RankReport, find_failed_ranks
from eprt.world import groups

VICTIM = 2
LIMIT_S = 2.0


@pytest.fixture(scope="module")
def pool():
    with WorldPool(4, timeout_s=60, grace_s=0.3) as pool:
        yield pool


class TestHealthy:
    def test_results_come_in_rank_order_and_are_larger_than_a_pipe(self, pool):
        found = pool.run(jobs.echo, word="ho")
        assert found == [("ho", rank, 4, str(rank), str(rank), "4") for rank in range(4)], "torchrun's environment"
        assert pool.run(jobs.fault, kind="nothing", victim=VICTIM) == [0, 1, 2, 3]
        assert pool.run(jobs.threads) == [1] * 4, "one thread per rank"
        assert [len(r) for r in pool.run(jobs.big, size=5_000_000)] == [5_000_000] * 4

    def test_a_semaphore_has_no_name_that_python_would_warn_of(self):
        assert launch(jobs.named_semaphore, 1) == [None]

    @pytest.mark.skipif("PYTHONHASHSEED" in os.environ, reason="ranks have the seed that it says")
    def test_ranks_walk_sets_in_orders_of_their_own(self, pool):
        first, second, third, fourth = pool.run(jobs.hash_seed)
        assert (first, second) == (fourth, third)
        assert first != second, "as torchrun's: pairs, and every other rank, differ"

    def test_collections_leave_out_what_the_server_imported(self, pool):
        for frozen, seen in pool.run(jobs.frozen):
            assert frozen > 100_000 > seen

    def test_a_server_that_imported_triton_ends_without_a_word(self):
        """Its bindings printed what they took for leaks behind the report of `eprt doctor --faults`."""
        pytest.importorskip("triton")
        server = "import eprt.ranks.freezing, triton, os\nif not os.fork(): os._exit(0)\nos.wait()"
        done = run_python("-c", server)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")

    def test_collectives_work_and_processes_are_reused(self, pool):
        pids = pool.run(jobs.pid)
        assert [pool.run(jobs.total) for _ in range(2)] == [[10] * 4] * 2
        assert pool.run(jobs.pid) == pids == pool.pids

    def test_the_cache_lives_from_job_to_job_beside_another_pool(self, pool):
        with WorldPool(2) as other:
            assert [other.run(jobs.remembers) for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]
            assert [other.run(jobs.total), pool.run(jobs.total)] == [[3] * 2, [10] * 4]

    def test_worlds_that_were_not_used_lately_are_closed_with_what_is_theirs(self):
        """But for the first, which the others' groups come from."""
        with WorldPool(2) as pool:
            for is_open, cached, closed in pool.run(jobs.worlds_in_turn, count=5):
                assert is_open == [True, False, False, True, True]
                assert cached == [0, 3, 4]
                assert closed == [False, True, True, False, False]

    def test_no_process_after_close(self):
        with WorldPool(3) as pool:
            pids = pool.run(jobs.pid)
        assert len(set(pids)) == 3
        wait_until_gone(pids)
        with pytest.raises(UsageError, match="closed"):
            pool.run(jobs.pid)


@pytest.mark.parametrize(
    ("kind", "says", "fast"),
    [
        ("killed", "killed by SIGKILL", True),
        ("crashes", "killed by SIGSEGV", True),
        ("exits", "exited with code 0 before it finished", True),
        ("raises", "raised ValueError: the victim's own words", True),
        ("stopped", "did not finish: stopped", False),
        ("sleeps", "does not wait for other ranks", False),
        ("holds_gil", "does not wait for other ranks", False),
    ],
)
def test_a_faulty_rank_is_named_in_bounded_time(pool, kind, says, fast):
    pids = pool.run(jobs.pid)
    start = time.monotonic()
    with pytest.raises(WorldFailed) as failure:
        pool.run(jobs.fault, kind=kind, victim=VICTIM, timeout_s=LIMIT_S)
    # Death and exceptions are seen at once; only a silent rank costs the limit. 4 s cover dumps and a busy machine.
    assert time.monotonic() - start < (0 if fast else LIMIT_S) + 4
    error = failure.value
    assert error.failed_ranks == (VICTIM,)
    first_line = str(error).splitlines()[0]
    assert f"rank {VICTIM}" in first_line
    assert says in first_line
    wait_until_gone(pids)
    # Every rank is in the report; whoever can still speak shows where it is.
    assert [report.rank for report in error.reports] == [0, 1, 2, 3]
    for report in error.reports:
        assert f"--- rank {report.rank} " in str(error)
        if report.outcome != "died":
            assert "jobs/rank_jobs.py" in report.stack + report.log_tail  # the log, if it is just now leaving the job
            assert report.stack.splitlines()[0].strip() in str(error)
    if kind == "crashes":
        assert "Segmentation fault" in error.reports[VICTIM].stack
    if not fast:
        assert all(r.waits_for_others for r in error.reports if r.rank != VICTIM)
    # The pool starts over by itself.
    assert pool.run(jobs.total) == [10] * 4


def test_a_rank_stopped_between_jobs_is_found_though_no_peer_waits_for_it(pool, monkeypatch):
    monkeypatch.setattr(launcher, "_STOPPED_AFTER_S", 0.5)
    pids = pool.run(jobs.pid)
    os.kill(pids[VICTIM], signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(WorldFailed, match="did not finish: stopped") as failure:
        pool.run(jobs.pid, timeout_s=60)
    assert time.monotonic() - start < 20
    assert failure.value.failed_ranks == (VICTIM,)
    wait_until_gone(pids)


@pytest.mark.parametrize(("last", "wait_s"), [("in <module>", 0.0), ("in main", 1.0)])
def test_a_stack_that_is_written_slowly_is_read_to_its_end(tmp_path, monkeypatch, last, wait_s):
    """A rank that shares its core may pause between two frames. One whose last frame isn't known is waited for."""
    monkeypatch.setattr(launcher, "_QUIET_S", 1.0)
    monkeypatch.setattr(launcher, "_STACK_WAIT_S", 30.0)
    dump = tmp_path / "stack"
    dump.write_text("00007f78067d9b80\n")

    def write() -> None:
        for line in ("Current thread 0x0 (most recent call first):", '  File "a.py", line 3 in work', f"  {last}"):
            time.sleep(0.2)
            with dump.open("a") as file:
                file.write(line + "\n")

    writer = threading.Thread(target=write)
    writer.start()
    start = time.monotonic()
    launcher._await_dumps({1: dump}, {1: dump.stat().st_size})
    assert dump.read_text().endswith(f"{last}\n")
    assert 0.6 + wait_s <= time.monotonic() - start < 20
    writer.join()


def test_a_stopped_ranks_children_go_too(pool):
    with pytest.raises(WorldFailed) as failure:
        pool.run(jobs.fault, kind="stopped_with_child", victim=VICTIM, timeout_s=LIMIT_S)
    [child] = re.findall(r"grandchild (\d+)", failure.value.reports[VICTIM].log_tail)
    wait_until_gone([int(child)])


def test_a_rank_killed_before_its_memory_is_shared_leaves_no_file(tmp_path):
    with pytest.raises(WorldFailed, match="rank 0 was killed by SIGKILL"):
        launch(jobs.dies_before_it_shares, 1, path=str(tmp_path / "pid"))
    pid = (tmp_path / "pid").read_text()
    assert not list(Path("/dev/shm").glob(f"eprt-{pid}-*"))


def test_survivors_that_name_a_rank_are_believed(pool):
    with pytest.raises(WorldFailed) as failure:
        pool.run(jobs.blames, victim=1, timeout_s=LIMIT_S)
    assert failure.value.failed_ranks == (1,)
    assert "named by rank 0, 2, 3" in str(failure.value)


def test_a_rank_that_dies_between_jobs_is_found_by_the_next(pool):
    pids = pool.run(jobs.pid)
    os.kill(pids[3], signal.SIGKILL)
    wait_until_gone([pids[3]])
    with pytest.raises(WorldFailed, match="rank 3 was killed by SIGKILL"):
        pool.run(jobs.echo)


def test_a_result_that_cannot_travel_is_a_failure_with_its_reason(pool):
    with pytest.raises(WorldFailed, match=r"PicklingError|AttributeError"):
        pool.run(jobs.unpicklable)


@pytest.mark.parametrize(("size", "device"), [(0, "cpu"), (2, "tpu"), (1000, "cuda")])
def test_a_world_that_cannot_be_is_refused(size, device):
    with pytest.raises(ConfigError):
        WorldPool(size, device)


def test_ranks_share_a_gpu_only_where_a_test_asks_for_it(monkeypatch):
    """torch.cuda is played here: one GPU. tests/gpu has the real ranks."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    with pytest.raises(ConfigError, match="ranks on CUDA: 2, GPUs here: 1; expected a GPU for each"):
        WorldPool(2, "cuda")
    WorldPool(2, "cuda", share_gpu=True).close()
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ConfigError, match="local rank 1: 1 CUDA devices here"):
        groups.local_device("cuda")
    assert groups.uses_nccl(torch.device("cuda", 0))
    monkeypatch.setenv(groups.SHARED_GPU, "1")
    assert groups.local_device("cuda") == torch.device("cuda", 0)
    assert not groups.uses_nccl(torch.device("cuda", 0))


PARENT = """
import sys
sys.path.insert(0, {tests!r})
from support.jobs import rank_jobs as jobs
from eprt.ranks.launcher import WorldPool
if __name__ == "__main__":
    pool = WorldPool(2, timeout_s=100)
    print(*pool.run(jobs.pid), flush=True)
    pool.run(jobs.fault, kind="sleeps", victim=1)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_ranks_end_with_their_parent(tmp_path, short_folder, number):
    """Also when it has no chance to clean up (SIGKILL), and on Ctrl-C while a job hangs."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(tests=str(Path(jobs.__file__).parents[2])))
    settings = os.environ | {"TMPDIR": str(short_folder)}  # a parent that is killed leaves its world's folder there
    with Python(script, env=settings, start_new_session=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        time.sleep(0.3)  # now the second job hangs
        parent.send_signal(number)
        assert parent.wait(timeout=20) != 0
        wait_until_gone(pids)


class TestVerdict:
    """Which evidence decides, without processes."""

    RAISED = Raised("ValueError", "own", "stack", at=1.0)
    PEER = Raised("RuntimeError", "Connection closed by peer", "stack", at=2.0)
    LOST = Raised("RankLost", "rank 1 is silent", "stack", at=0.5, lost_rank=1, why="silent")
    STORE = Raised("RankLost", "the store is gone", "stack", at=0.5, lost_rank=-1, why="store")

    @pytest.mark.parametrize(
        ("reports", "failed"),
        [
            ([RankReport(0, "raised", raised=PEER), RankReport(1, "died", exit_code=-9)], (1,)),
            ([RankReport(0, "died", exit_code=-6), RankReport(1, "died", exit_code=0)], (1,)),
            ([RankReport(0, "died", exit_code=-6), RankReport(1, "raised", raised=RAISED)], (1,)),
            ([RankReport(0, "raised", raised=PEER), RankReport(1, "raised", raised=RAISED)], (1,)),
            ([RankReport(0, "raised", raised=LOST), RankReport(1, "unfinished", state="sleeping")], (1,)),
            ([RankReport(0, "unfinished", waits_for_others=True), RankReport(1, "unfinished")], (1,)),
            ([RankReport(0, "ok"), RankReport(1, "unfinished", waits_for_others=True)], (1,)),
            ([RankReport(r, "unfinished", waits_for_others=True) for r in range(2)], (0, 1)),
            ([RankReport(0, "raised", raised=STORE), RankReport(1, "ok")], (0,)),
        ],
    )
    def test_strongest_evidence_wins(self, reports, failed):
        assert find_failed_ranks(reports) == failed
