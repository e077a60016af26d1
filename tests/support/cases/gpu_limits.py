"""How long the GPU tests' jobs may take, and how long their ranks wait for each other."""

from __future__ import annotations

import os

# Room for what a first run may compile: FlashInfer's all-to-all takes 3.5 minutes on 64 cores where it isn't installed
# with its kernels, humming's 70 kernels of a layer a minute, Triton seconds. Where all of that is there, a lower limit
# ends a hang sooner.
JOB_S = float(os.environ.get("EPRT_TEST_JOB_S", "420"))

BEHIND_S = 300.0  # one rank may compile while the others are done
