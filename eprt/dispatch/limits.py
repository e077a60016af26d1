"""Limits that a row of the table states and an implementation is built on: said once, importable without either."""

from __future__ import annotations

SYMM_MAX_RANKS = 8  # GPUs of one NVLink host
SYMM_R_BITS = 20  # of a flag of symm's kernels carry R
DEEPEP_MAX_TOKENS = 1024  # a rank: deep_ep 1.2.1, FINISHED_SUM_TAG of csrc/kernels/internode_ll.cu
