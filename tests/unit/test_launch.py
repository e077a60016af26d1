"""What launch/ starts: one DP+EP world over torchrun "nodes" of this machine, which goes on after a rank was killed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from support.jobs.resumable import ITEMS, KILLED_BEFORE
from support.ports import free_port
from torch.distributed.run import get_args_parser

from eprt.cli.parsing import COMMANDS

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "support" / "jobs" / "resumable.py"


def run(commands: Sequence[Sequence[str | Path]], **environment: str) -> None:
    """All at once; every one must end well."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    settings = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment
    started = [
        subprocess.Popen(
            [str(word) for word in command], env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command in commands
    ]
    try:
        said = [process.communicate(timeout=100)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * len(started), "\n\n".join(said)


def check(progress: Path, ranks: int, generations: list[int]) -> None:
    """Every item once, in order, right, and by the generation that should have done it."""
    rows = [json.loads(line) for line in progress.read_text().splitlines()]
    assert [row["item"] for row in rows] == list(range(ITEMS))
    assert [row["generation"] for row in rows] == generations
    assert {row["ranks"] for row in rows} == {ranks}
    assert max(row["error"] for row in rows) <= 1e-5  # float32 sums in another order


ONCE = [0] * ITEMS
RESUMED = [0] * KILLED_BEFORE + [1] * (ITEMS - KILLED_BEFORE)


def test_a_node_goes_on_after_a_rank_was_killed(tmp_path: Path) -> None:
    progress = tmp_path / "progress"
    run([[ROOT / "launch/node.sh", PROGRAM, progress, "1"]], RANKS="2", MAX_RESTARTS="1")
    check(progress, 2, RESUMED)


@pytest.mark.parametrize("script", ["node.sh", "multinode.sh"])
@pytest.mark.parametrize("ranks", ["0", "-1", "two"])
def test_a_number_of_ranks_that_is_none_is_refused(script: str, ranks: str) -> None:
    settings = os.environ | {"PYTHON": sys.executable, "RANKS": ranks, "NODES": "1", "HEAD": "localhost"}
    done = subprocess.run([ROOT / "launch" / script, PROGRAM], env=settings, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, f"RANKS={ranks}: expected a number from 1 on\n")


@pytest.mark.parametrize("victim", [0, 3])
def test_two_nodes_go_on_after_a_rank_of_one_was_killed(tmp_path: Path, victim: int) -> None:
    """The agent of the other node may restart its ranks without counting it: the generation is the world's all the
    same."""
    progress = tmp_path / "progress"
    command = [ROOT / "launch/multinode.sh", PROGRAM, progress, str(victim)]
    run([command] * 2, NODES="2", HEAD="localhost", PORT=str(free_port()), RANKS="2", MAX_RESTARTS="1")
    check(progress, 4, RESUMED)


def test_slurm(tmp_path: Path) -> None:
    """The batch script with stand-ins of scontrol and srun: srun starts its command once a node. Slurm runs a copy of
    the script, and the interpreter is that of the checkout which it was copied from."""
    checkout, spooled = tmp_path / "a checkout", tmp_path / "slurm_script"
    shutil.copy(ROOT / "launch/slurm.sbatch", spooled)
    job = f"JobId=7 JobName=eprt\\n   Command={checkout}/launch/slurm.sbatch -m eprt run\\n   WorkDir=/\\n"
    stand_ins = {
        "scontrol": 'echo "$@" >>"$SEEN"; [ "$1 $2" = "show hostnames" ] || { printf "' + job + '"; exit; }; '
        'printf "localhost\\nother\\n"',
        f"{checkout.name}/.venv/bin/python": f'echo "its python" >>"$SEEN"; exec {sys.executable} "$@"',
        "srun": 'echo "$@" >>"$SEEN"; while [ "${1#--}" != "$1" ]; do [ "${1#*=}" != "$1" ] || shift; shift; done; '
        '"$@" & first=$!; "$@"; wait "$first"',
    }
    for name, body in stand_ins.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\nset -e\n{body}\n")
        (tmp_path / name).chmod(0o755)
    progress, seen = tmp_path / "progress", tmp_path / "seen"
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_NUM_NODES": "2"}
    slurm |= {"SLURM_GPUS_ON_NODE": "2", "SLURM_SUBMIT_DIR": str(tmp_path / "with a space")}
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    run([["bash", spooled, PROGRAM, progress]], PYTHON="", PATH=path, SEEN=str(seen), PORT=str(free_port()), **slurm)
    check(progress, 4, ONCE)
    assert "show hostnames node[0-1]" in seen.read_text()
    assert seen.read_text().count("its python") == 2
    assert "--kill-on-bad-exit=1" in seen.read_text()
    assert sorted((tmp_path / "with a space" / "eprt-7").glob("*/attempt_0/*/stderr.log")), "no log of any rank"


def flags(kind: Any) -> Iterator[str]:
    """Those of a command, and of the settings inside of it."""
    for name, hint in get_type_hints(kind).items():
        yield from flags(hint) if is_dataclass(hint) else [f"--{name.replace('_', '-')}"]


def test_torchrun_leaves_a_command_its_flags_but_one() -> None:
    """It looks for its own options among a program's, too, and takes their beginnings for them."""

    def left(*words: str) -> list[str]:
        with suppress(SystemExit):
            return get_args_parser().parse_args(["-m", "eprt", *words]).training_script_args
        return []

    words = [(*name.split(), flag) for name, (kind, _) in COMMANDS.items() for flag in flags(kind)]
    assert len(words) > 100
    assert [each for each in words if left(*each) != list(each)] == [("doctor", "--run")]
    shown = (ROOT / "docs/launch.md").read_text().split("launch/node.sh -m eprt -- ", 1)[1].split("\n")[0]
    assert left("--", *shown.split()) == shown.split()


class TestKubernetes:
    """One indexed Job whose pods find each other by the Service."""

    service, job = yaml.safe_load_all((ROOT / "launch/kubernetes.yaml").read_text())
    spec = job["spec"]
    pod = spec["template"]["spec"]
    words = pod["containers"][0]["command"]

    def option(self, name: str) -> str:
        [value] = [word.partition("=")[2] for word in self.words if word.startswith(f"--{name}=")]
        return value

    def test_is_valid(self) -> None:
        kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="scripts/setup.sh test installs it")
        for resource in (self.service, self.job):
            kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)
        wrong = self.job | {"spec": self.spec | {"completion": 2}}
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)

    def test_its_numbers_and_names_agree(self) -> None:
        name = self.job["metadata"]["name"]
        assert self.spec["completionMode"] == "Indexed"
        assert self.spec["completions"] == self.spec["parallelism"] == int(self.option("nnodes"))
        limits = self.pod["containers"][0]["resources"]["limits"]
        assert int(limits["nvidia.com/gpu"]) == int(self.option("nproc-per-node"))
        assert self.service["spec"]["clusterIP"] == "None"
        assert self.service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
        [port] = self.service["spec"]["ports"]
        assert self.option("rdzv-endpoint") == f"{name}-0.{self.service['metadata']['name']}:{port['port']}"
        assert self.pod["subdomain"] == self.service["metadata"]["name"]

    def test_its_command_starts_the_world(self, tmp_path: Path) -> None:
        changes = {"--nproc-per-node": "2", "--rdzv-endpoint": f"localhost:{free_port()}"}
        torchrun = [sys.executable, *self.words[1 : self.words.index("-m", 2)]]
        for index, word in enumerate(torchrun):
            name = word.partition("=")[0]
            torchrun[index] = f"{name}={changes[name]}" if name in changes else word
        progress = tmp_path / "progress"
        run([[*torchrun, PROGRAM, progress]] * int(self.option("nnodes")))
        check(progress, 2 * int(self.option("nnodes")), ONCE)
