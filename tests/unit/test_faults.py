"""No hang, no stranger, no silent wrong answer: what a World does when ranks or its store die, stop or lie.

test_fault_trials.py has every fault at every moment.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.jobs import fault_jobs as jobs
from support.ports import free_port
from support.processes import Python, environment, run_python

import eprt
from eprt.config import MoEConfig
from eprt.conformance.faults.matrix import FAULTS, TIMEOUT_S, Trial
from eprt.conformance.faults.trial import judge
from eprt.errors import UsageError, one_block
from eprt.ranks.launcher import WorldFailed, launch
from eprt.world import guard, wire

SLACK_S = 25.0  # a loaded machine starts four processes that import torch


def failed(job, size: int, **settings: object) -> WorldFailed:
    with pytest.raises(WorldFailed) as failure:
        launch(job, size, **{"timeout_s": 40.0, "grace_s": 6.0} | settings)
    return failure.value


def verdict(failure: WorldFailed, *lost: int) -> tuple[str, int, str, str]:
    """(error, lost rank, why, message) of those that weren't lost: all say the same."""
    raised = [report.raised for report in failure.reports if report.rank not in lost]
    assert all(raised), str(failure)
    (found,) = {(r.error, r.lost_rank, r.why, r.message) for r in raised}
    return found


@pytest.mark.parametrize(
    ("victim", "fate", "place", "why"),
    [
        (0, "stops", "", "silent"),  # it serves the store
        (0, "stops", "init_default_group", "silent"),
        (1, "dies", "rendezvous.listen", "exited"),
        (0, "dies", "init_default_group", "exited"),
        (1, "dies", "make_meshes", "exited"),
        (2, "dies", "lifecycle.control_group", "exited"),
    ],
)
def test_one_verdict_while_ranks_meet_and_without_the_store(victim: int, fate: str, place: str, why: str) -> None:
    start = time.monotonic()
    hangs = {"not_awaited": victim} if fate == "stops" else {}
    failure = failed(jobs.meets_without_torchrun, 3, port=free_port(), victim=victim, fate=fate, place=place, **hangs)
    assert time.monotonic() - start < jobs.LIMIT_S + 6.0 + SLACK_S
    assert verdict(failure, victim)[:3] == ("RankLost", victim, why), failure


@contextmanager
def agents_store() -> Iterator[tuple[Python, int]]:
    """A process that serves a store, and its port."""
    serve = (
        "import sys, time, torch.distributed as d\n"
        "store = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "sys.stdout.write(f'{store.port}\\n')\nsys.stdout.flush()\ntime.sleep(100)"
    )
    with Python("-c", serve) as server:
        yield server, int(server.stdout.readline())


@pytest.mark.parametrize("what", ["SIGSTOP", "SIGKILL"])
@pytest.mark.parametrize(
    ("size", "job"),
    [(1, jobs.loses_the_store_at_once), (2, jobs.loses_the_store_once_ranks_met), (3, jobs.outlives_the_store)],
)
def test_the_store_of_torchruns_agent_is_blamed_and_nobody_innocent(what: str, size: int, job) -> None:
    """Also where it ends before it is claimed."""
    with agents_store() as (server, port):
        failure = failed(job, size, port=port, server=server.pid, what=what)
    error, rank, why, message = verdict(failure)
    assert (error, rank, why) == ("RankLost", -1, "store"), failure
    assert message.startswith("the control store "), message
    assert size == 3 or "torchrun's agent" in message


def test_a_rank_that_goes_on_after_the_verdict_agrees_with_it() -> None:
    failure = failed(jobs.is_stopped_and_goes_on, 4, victim=0)
    assert verdict(failure)[:3] == ("RankLost", 0, "silent"), failure


def test_a_job_that_is_stopped_as_a_whole_goes_on() -> None:
    assert launch(jobs.all_are_stopped_and_go_on, 3, timeout_s=40.0) == ["healthy"] * 3


def test_a_rank_that_hears_nobody_ends_itself() -> None:
    failure = failed(jobs.is_cut_off, 4, victim=2)
    error, rank, why, message = verdict(failure, 2)
    assert (error, rank) == ("RankLost", 2), message
    assert why in ("silent", "exited"), message  # it may be gone before the others' limit
    error, rank, why, message = verdict(failure, 0, 1, 3)
    assert (error, rank, why) == ("RankLost", 2, "silent"), message
    assert "it hears none of its 3 peers: it is cut off" in message


def test_a_blocked_port_is_named_with_the_word_firewall() -> None:
    """Rank 2 alone can't connect to the guard of rank 0: a firewall drops what it sends there. The two blame each other
    at the same time, and rank 1 believes whom it hears first: two verdicts may stand, both of which name the port."""
    failure = failed(jobs.is_blocked, 3, victim=2)
    messages = [report.raised.message for report in failure.reports if report.raised]
    assert len(messages) == 3
    for message in messages:
        assert re.search(
            r"rank 2 can't connect to 127\.0\.0\.1 port \d+, where rank 0 listens: is there a firewall\? .*`ulimit -n`",
            message,
        )


def test_all_that_are_lost_at_once_are_named() -> None:
    _, rank, why, message = verdict(failed(jobs.two_die_at_once, 4, grace_s=4), 1, 3)
    assert (rank, why) == (1, "exited")
    assert all(said in message for said in ("rank 1 exited", "rank 3 exited")), message


def test_a_peers_words_reach_nobody_uncleaned_or_uncut() -> None:
    _, rank, why, message = verdict(failed(jobs.a_verdict_with_control_characters, 2, grace_s=4), 1)
    assert (rank, why) == (1, "raised")
    assert not {"\x1b", "\x07"} & set(message)
    assert len(message) < 5000


WORLD = """
import os, sys, torch
from eprt.world import World
with World.from_env("cpu", timeout_s={timeout}) as world:
    total = world.gather_control(torch.tensor([world.rank]))
    {then}
    world.barrier()
"""


def process(rank: int, size: int, port: int, then: str = "pass", timeout: float = 3.0, **more: str) -> Python:
    settings = environment(RANK=str(rank), WORLD_SIZE=str(size), MASTER_PORT=str(port), **more)
    return Python("-c", WORLD.format(timeout=timeout, then=then), env=settings)


def first_line(rank: Python) -> str:
    """What a rank printed first; gloo of torch 2.10 prints lines of its own."""
    return next(line for line in iter(rank.stdout.readline, "") if not line.startswith("[Gloo]"))


def finish(*processes: Python) -> list[tuple[int, str]]:
    try:
        return [(p.wait(150), p.stderr.read()) for p in processes]
    finally:
        for p in processes:
            p.kill()
            p.communicate()


def test_a_lost_rank_at_start_up_is_exit_code_75() -> None:
    ((code, said),) = finish(process(0, 2, free_port(), timeout=1.0))
    assert code == 75, said
    assert "RankLost: ranks [1] of 2 didn't come within 1 s of start-up; look at their logs. Restart the job." in said


def test_a_late_rank_hears_from_rank_0s_store_though_rank_0_is_through() -> None:
    """Rank 1 is killed while it meets rank 0, whose process ends, too; rank 2 comes after that."""
    port = free_port()
    joins = "import eprt.world.rendezvous as r; join = r._Attempt.join\n"
    joins += "r._Attempt.join = lambda *given: (join(*given), print('joined', flush=True))\n"
    code, names = joins + WORLD.format(timeout=100.0, then="pass"), {"WORLD_SIZE": "3", "MASTER_PORT": str(port)}
    pair = [Python("-c", code, env=environment(RANK=rank, **names)) for rank in "01"]
    assert [rank.stdout.readline() for rank in pair] == ["joined\n"] * 2
    pair[1].kill()
    time.sleep(2.0)
    started = time.monotonic()
    (late,) = finish(process(2, 3, port, timeout=100.0))
    first, _ = finish(*pair)
    assert time.monotonic() - started < 60.0
    assert (first[0], late[0]) == (75, 75)
    words = [re.search(r"RankLost: (.*)", said).group(1) for _, said in (first, late)]
    assert words[0] == words[1]
    assert words[0].startswith("rank 1 exited while ranks met"), words


@pytest.mark.parametrize("host", ["no-such-host.invalid", "no..name"])
def test_a_master_that_resolves_to_nothing_is_named(host: str) -> None:
    ((code, said),) = finish(process(1, 2, free_port(), timeout=1.0, MASTER_ADDR=host))
    assert code == 75
    assert f"MASTER_ADDR='{host}' resolves to nothing on this host" in said


def await_server(port: int) -> None:
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)


def test_a_process_of_another_job_is_refused_and_named() -> None:
    """And a store for one host listens on loopback only."""
    port, address = free_port(), socket.gethostbyname(socket.gethostname())
    rank_0 = process(0, 2, port, EPRT_JOB="mine", timeout=100.0)
    await_server(port)
    if not address.startswith("127."):
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((address, port), 1.0).close()
    time.sleep(0.5)  # its claim follows at once
    ((code, said),) = finish(process(1, 2, port, EPRT_JOB="theirs"))
    assert code != 0
    assert "belongs to job 'EPRT_JOB=mine'" in said
    ours = finish(process(1, 2, port, EPRT_JOB="mine", timeout=100.0), rank_0)
    assert [code for code, _ in ours] == [0, 0], ours


def test_a_second_process_of_one_rank_is_refused_and_the_world_goes_on() -> None:
    """It comes when the ranks have met: what it writes to the store decides nothing any more."""
    port = free_port()
    until_told = "print('up', flush=True); import sys; sys.stdin.readline()"
    pair = [process(rank, 2, port, then=until_told, timeout=100.0) for rank in (0, 1)]
    for rank in pair:
        assert first_line(rank) == "up\n"
    ((code, said),) = finish(process(1, 2, port, timeout=100.0))
    assert code != 0
    assert "two processes say that they are rank 1" in said
    for rank in pair:
        rank.stdin.write("\n")
        rank.stdin.flush()
    ours = finish(*pair)
    assert [code for code, _ in ours] == [0, 0], ours


STEPS = (  # a closed stdout, as after `>&-`, keeps no rank from its exit code
    "world.drain_on_sigterm(); print('up', flush=True); sys.stdout = None; "
    "exec('for n in range(10**6):\\n with world.step(1): pass')"
)


@pytest.mark.parametrize("asked", [(1,), (0,), (0, 1)])
def test_sigterm_ends_the_step_and_then_the_rank(asked: tuple[int, ...]) -> None:
    port = free_port()
    ranks = [process(rank, 2, port, then=STEPS, timeout=100.0) for rank in range(2)]
    for rank in ranks:
        assert first_line(rank) == "up\n"
    time.sleep(0.5)
    for rank in asked:
        ranks[rank].send_signal(signal.SIGTERM)
    for rank, (code, said) in enumerate(finish(*ranks)):
        assert code == (0 if rank in asked else 75), said
        if rank not in asked:
            assert f"rank {asked[0]} left: closed its World" in said


COMBINED = "UsageError: combine on a handle that is already combined: dispatch again for a new one"


@pytest.mark.parametrize(
    ("job", "found"),
    [
        (jobs.two_of_one_name, ["healthy"] * 2),  # hosts of one name are told apart
        (jobs.garbage_for_the_guard, ["None"] * 3),  # strangers and garbage end nothing
        (jobs.combines_twice_on_one_rank, [["right"], [COMBINED, "right"], ["right"]]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_leaves_the_world_as_it_is(job, found: list) -> None:
    assert launch(job, len(found)) == found


PLAIN = [None, True, -3, 2.5, "é\n", b"\0\xff", [1, [2, ()]], (1, "a", None), {"a": {1: (2,)}}]


@pytest.mark.parametrize("value", [*PLAIN, torch.bfloat16, MoEConfig(8, 2, 16, 8)])
def test_values_travel(value: object) -> None:
    found = wire.unpack(wire.pack(value))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_travel(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.ones(shape).to(dtype)
    found = wire.unpack(wire.pack(value))
    assert (found.dtype, found.shape) == (dtype, value.shape)
    assert torch.equal(found, value)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x80\x04K\x05.",
        b"[" * 100_000,
        b'{"dataclass": ["subprocess", "Popen", {"args": "true"}]}',
        b'{"dataclass": ["eprt.world", "os.system", {}]}',
        b'{"dataclass": ["eprt.config", "MoEConfig", {"num_experts": -1}]}',
        b'{"tensor": ["float32", [1000000], "AAAA"]}',
        b'{"tensor": ["load", [1], "AAAA"]}',
        b'{"eval": "1"}',
        b'{"a": 1, "b": 2}',
        b"",
    ],
)
def test_bytes_that_are_no_value_are_refused(raw: bytes) -> None:
    with pytest.raises(UsageError, match="can't be read"):
        wire.unpack(raw)


def test_what_does_not_travel_is_said_before() -> None:
    with pytest.raises(UsageError, match=r"subprocess\.Popen doesn't travel|builtins\.object doesn't travel"):
        wire.pack([object()])


def test_nothing_that_can_run_code_travels_or_is_loaded() -> None:
    """pickle stays inside one machine's own files (launcher and compiler hand jobs to their processes)."""
    objects = r"(?:gather|scatter|broadcast|send|recv)_object"
    forbidden = re.compile(rf"^\s*(?:import|from) pickle|pickle\.|torch\.load\(|\beval\(|{objects}|\bexec\(")
    harmless = re.compile(r"\.eval\(\)|py_object\(")  # sets a mode; `ctypes.py_object(...)` is no collective
    found = set()
    root = Path(eprt.__file__).parent
    for path in root.rglob("*.py"):
        if any(forbidden.search(line) and not harmless.search(line) for line in path.read_text().splitlines()):
            found.add(str(path.relative_to(root)))
    assert found == {"ranks/launcher.py", "ranks/process.py", "compile_ahead.py"}


def test_one_block_cleans_and_cuts() -> None:
    assert one_block("a\x1b[2Jb\r\nc") == "a?[2Jb?\nc"
    assert len(one_block("x" * 10**6, 100)) == 100


PROMISE = re.compile(r"^\| .* \| `(\w+)` \| (?:about )?(at once|[\d.]+ s|the World's timeout)", re.MULTILINE)


def promises() -> dict[str, float]:
    """Seconds by `RankLost.why`, in a World of `TIMEOUT_S`; the largest where a why has two rows."""
    page = (Path(__file__).parents[2] / "docs/limits_and_errors.md").read_text()
    found: dict[str, float] = {}
    for why, words in PROMISE.findall(page):
        named = TIMEOUT_S if "timeout" in words else float(words.removesuffix(" s").replace("at once", "0"))
        shorter = TIMEOUT_S / 2 + 1 if why in ("silent", "store") and named >= 10 else named
        found[why] = max(found.get(why, 0.0), shorter)
    return found


def test_the_table_of_promises_is_the_guards() -> None:
    assert set(promises()) == set(guard._WHY)
    for fault in FAULTS.values():
        if fault.why != "mismatch":
            assert promises()[fault.why] <= fault.limit_s <= promises()[fault.why] + 1.0, fault.name
    documented = eprt.RankLost.__doc__ or ""
    assert all(f"`{why}`" in documented for why in guard._WHY)


def test_a_process_whose_host_sits_in_a_kernel_says_so_and_is_heard() -> None:
    """A call that no verdict wakes stands for the kernel; the guard's own report is what the judge reads."""
    failure = failed(jobs.sits_in_a_kernel, 3, grace_s=8, victim=1)
    assert [report.exit_code for report in failure.reports if report.rank != 1] == [75, 75], str(failure)
    trial = Trial("kill", "dispatch", 1, "symm", 3, "cuda")
    at = float(failure.reports[1].log_tail.rpartition("killed at ")[2].split()[0])
    result = judge(trial, failure.reports, [{}, {}, {}], at)
    assert result.ok, result
    assert result.seconds is not None
    assert 2.0 < result.seconds < trial.limit_s
    (words,) = result.verdicts
    assert words.startswith("rank 1 exited: process")


def test_guards_of_two_worlds_in_one_process_speak_one_after_the_other(monkeypatch, capsys) -> None:
    """Else a verdict stands in the middle of the other World's stacks, and not last, where logs are read."""
    monkeypatch.setattr(guard, "leave_at_once", lambda code: None)
    monkeypatch.setattr(guard.faulthandler, "dump_traceback", lambda **_: time.sleep(0.3))
    stuck = SimpleNamespace(rank=0, verdict="rank 1 exited", _stop=threading.Event(), _raised=False)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda one: guard.Guard._exit_if_stuck(one, one.verdict), [stuck, stuck]))
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith(guard.LAST_WORDS) for line in lines] == [False, True, False, True], lines


def test_a_soak_counts_what_the_process_holds(tmp_path: Path) -> None:
    script, output = Path(__file__).parents[2] / "scripts/soak.py", tmp_path / "soak.json"
    words = ["--world", "2", "--steps", "20", "--output", str(output)]
    done = run_python(script, *words)
    assert "PASS: 20 steps on 2 gloo ranks by torch" in done.stdout, done
    seen = [row for row in json.loads(output.read_text())["rows"] if row["rank"] == 1]
    assert [look["step"] for look in seen] == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 19]
    assert seen[-1]["threads"] == seen[2]["threads"]
    assert 0 < seen[-1]["resident_mb"] < 10_000
