"""Runs `eprt doctor`: reports what this machine is, what works on it, what doesn't and why; --run proves it."""

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
from eprt.cli.terminal import Column, Terminal
from eprt.conformance.checks import Check, CheckRow, run_checks, standard_checks, summarize
from eprt.support import Device

FACTS: dict[str, Column] = {"": lambda fact: fact[0], " ": lambda fact: fact[1]}
BACKENDS: dict[str, Column] = {
    "": lambda row: "ok" if row["ok"] else "no",
    " ": "kind",
    "name": "name",
    "what it is, or what is missing": "reason",
}
FIRST_USE: dict[str, Column] = {
    "kernels": "kernels",
    "needed by": "needed_by",
    "takes": "takes",
    "found here": lambda row: "yes" if row["cached"] else "no",
}
KEYS = ("check", "dispatcher", "tokens", "executor", "layer", "attention-TP x MoE-TP")
PROOF: dict[str, Column] = {name: name for name in ("", *KEYS, "passed", "worst error")}


def doctor(arguments: Doctor, terminal: Terminal) -> int:
    """Prints the report. Returns 1 if a conformance check of --run or a trial of --faults failed, else 0."""
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
    terminal.table("Versions (- is not installed)", FACTS, report["versions"].items())
    machine = [*(("device", line) for line in report["devices"]), *report["host"].items()]
    terminal.table("Machine", FACTS, machine)
    if report["links"]:
        terminal.say(f"\nLinks between GPUs\n{report['links']}")
    terminal.table("Usable here", BACKENDS, report["backends"])
    title = "Compiled on first use (World.warmup does it on all ranks at once)"
    terminal.table(title, FIRST_USE, report["first_use"])
    if report["problems"]:
        terminal.table("Problems", {"found": "what", "remedy": "remedy"}, report["problems"])
    else:
        terminal.say("\nNo problems found.")


def _prove(device: str, size: int, terminal: Terminal) -> dict[str, Any]:
    """Runs every conformance case on every pair that can run here, in one world."""
    where = Device.of(torch.device(device, 0) if device == "cuda" else torch.device("cpu"))
    groups: dict[tuple[str, ...], list[Check]] = defaultdict(list)
    for check in standard_checks(size, where):
        groups[_group(check)].append(check)
    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    failures: list[CheckRow] = []
    with ranks(size, device) as workers, terminal.progress(f"{device} x {size}", len(groups)) as progress:
        for key, checks in groups.items():
            results = summarize(workers.run(run_checks, checks=checks))
            bad = [row for row in results if not row.ok]
            failures += bad
            passed = f"{len(results) - len(bad)}/{len(results)}"
            found = {
                "": "FAIL" if bad else "ok",
                "passed": passed,
                "worst error": f"{max(r.error for r in results):.1e}",
            }
            rows.append({**dict(zip(KEYS, key, strict=True)), **found})
            progress.advance(" ".join(part for part in key if part))
    kind = "gloo ranks on the CPU" if device == "cpu" else "GPUs"
    terminal.table(f"Conformance: {size} {kind}, every case of counts x routing", PROOF, rows)
    for row in failures[:10]:
        terminal.say(f"FAIL {row.check.name}: rank {row.rank}, error {row.error:.1e} {row.detail}")
    total = sum(map(len, groups.values()))
    verdict, seconds = "FAIL" if failures else "PASS", time.monotonic() - started
    terminal.say(f"\n{verdict}: {total - len(failures)} of {total} checks on {size} {device} ranks in {seconds:.0f} s")
    failed = [{"check": r.check.name, "rank": r.rank, "error": r.error, "detail": r.detail} for r in failures]
    return {"device": device, "size": size, "checks": total, "failures": failed}


def _group(check: Check) -> tuple[str, ...]:
    """Returns the line of the table that a check belongs to: its values of `KEYS`."""
    layer = check.config if isinstance(check.config, str) else check.name.removesuffix(f"-{check.case.name}")
    sizes = f"{check.attention_tp_size} x {check.moe_tp_size}"
    return check.kind, check.dispatcher, check.token_format, check.executor, layer, sizes
