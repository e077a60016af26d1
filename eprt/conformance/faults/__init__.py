"""The fault matrix: break one rank at one moment, and hold what the others say and do to what README promises.

A trial is a fresh world whose ranks run a layer step by step and check every output against a formula of its own. The
victim breaks as its row says. What counts: no survivor waits longer than the promise, all name the same rank and it is
the right one, no output was wrong, nothing is left over, and, where they are to go on without the victim, they do.
`eprt doctor --faults` runs them.
"""

from eprt.conformance.faults.job import Job, WrongOutput, soak
from eprt.conformance.faults.matrix import FAULTS, SLACK_S, START_UP, TIMEOUT_S, Trial, controls, trials
from eprt.conformance.faults.schedule import run_trials
from eprt.conformance.faults.trial import Result, judge, run_trial

__all__ = [
    "FAULTS",
    "SLACK_S",
    "START_UP",
    "TIMEOUT_S",
    "Job",
    "Result",
    "Trial",
    "WrongOutput",
    "controls",
    "judge",
    "run_trial",
    "run_trials",
    "soak",
    "trials",
]
