"""`eprt doctor`: what this machine is, what works on it, what doesn't and why; with --run, the proof."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import asdict
from typing import Any

import torch

from eprt import diagnosis
from eprt.cli.arguments import Doctor
from eprt.cli.doctor_faults import break_ranks
from eprt.cli.ranks import ranks
from eprt.cli.terminal import Terminal
from eprt.conformance.checks import Check, Row, run_checks, standard_checks, summarize
from eprt.support import Device


def doctor(arguments: Doctor, terminal: Terminal) -> int:
    """The command. Returns 1 if a conformance check of --run or a trial of --faults failed, else 0."""
    report = _facts()
    _say(report, terminal)
    failed = 0
    if arguments.run:
        worlds = [("cpu", arguments.world)]
        worlds += [("cuda", torch.cuda.device_count())] if torch.cuda.is_available() else []
        report["conformance"] = [_prove(device, size, terminal) for device, size in worlds]
        failed = sum(len(world["failures"]) for world in report["conformance"])
    if arguments.faults:
        report["faults"] = break_ranks(arguments, terminal)
        failed += sum(not row["ok"] for row in report["faults"])
    terminal.result(report)
    return 1 if failed else 0


def _facts() -> dict[str, Any]:
    device = diagnosis.this_device()
    return {
        "versions": diagnosis.versions(),
        "devices": diagnosis.devices(),
        "host": diagnosis.host(),
        "links": diagnosis.links(),
        "backends": [
            {"kind": b.kind, "name": b.name, "ok": b.support.ok, "reason": b.support.reason or b.summary}
            for b in diagnosis.backends(device)
        ],
        "first_use": [asdict(item) for item in diagnosis.first_use()],
        "problems": [asdict(problem) for problem in diagnosis.problems()],
    }


def _say(report: dict[str, Any], terminal: Terminal) -> None:
    terminal.table("Versions (- is not installed)", ["", ""], [list(item) for item in report["versions"].items()])
    host = [list(item) for item in report["host"].items()]
    terminal.table("Machine", ["", ""], [*(["device", line] for line in report["devices"]), *host])
    if report["links"]:
        terminal.say(f"\nLinks between GPUs\n{report['links']}")
    terminal.table(
        "Usable here",
        ["", "", "name", "what it is, or what is missing"],
        [["ok" if b["ok"] else "no", b["kind"], b["name"], b["reason"]] for b in report["backends"]],
    )
    terminal.table(
        "Compiled on first use (World.warmup does it on all ranks at once)",
        ["kernels", "needed by", "takes", "found here"],
        [[f["kernels"], f["needed_by"], f["takes"], "yes" if f["cached"] else "no"] for f in report["first_use"]],
    )
    if report["problems"]:
        rows = [[p["what"], p["remedy"]] for p in report["problems"]]
        terminal.table("Problems", ["found", "remedy"], rows)
    else:
        terminal.say("\nNo problems found.")


def _prove(device: str, size: int, terminal: Terminal) -> dict[str, Any]:
    """Every conformance case on every pair that can run here, in one world."""
    where = Device.of(torch.device(device, 0) if device == "cuda" else torch.device("cpu"))
    groups: dict[tuple[str, ...], list[Check]] = defaultdict(list)
    for check in standard_checks(size, where):
        sizes = f"{check.attention_tp_size} x {check.moe_tp_size}"
        layer = check.name.removesuffix(f"-{check.case.name}") if not isinstance(check.config, str) else check.config
        groups[(check.kind, check.dispatcher, check.token_format, check.executor, layer, sizes)].append(check)
    started = time.monotonic()
    rows: list[list[object]] = []
    failures: list[Row] = []
    with ranks(size, device) as workers, terminal.progress(f"{device} x {size}", len(groups)) as progress:
        for key, checks in groups.items():
            results = summarize(workers.run(run_checks, checks=checks))
            bad = [row for row in results if not row.ok]
            failures += bad
            worst = max(row.error for row in results)
            rows.append(["FAIL" if bad else "ok", *key, f"{len(results) - len(bad)}/{len(results)}", f"{worst:.1e}"])
            progress.advance(" ".join(part for part in key if part))
    terminal.table(
        f"Conformance: {size} {'gloo ranks on the CPU' if device == 'cpu' else 'GPUs'}, every case of counts x routing",
        ["", "check", "dispatcher", "tokens", "executor", "layer", "attention-TP x MoE-TP", "passed", "worst error"],
        rows,
    )
    for row in failures[:10]:
        terminal.say(f"FAIL {row.check.name}: rank {row.rank}, error {row.error:.1e} {row.detail}")
    total = sum(map(len, groups.values()))
    verdict = "FAIL" if failures else "PASS"
    terminal.say(
        f"\n{verdict}: {total - len(failures)} of {total} checks on {size} {device} ranks in "
        f"{time.monotonic() - started:.0f} s"
    )
    return {"device": device, "size": size, "checks": total, "failures": [_failure(row) for row in failures]}


def _failure(row: Row) -> dict[str, Any]:
    return {"check": row.check.name, "rank": row.rank, "error": row.error, "detail": row.detail}
