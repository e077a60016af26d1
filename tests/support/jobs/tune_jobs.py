"""Jobs for test_tune.py."""

from __future__ import annotations

import time


def compiles_for_a_minute(context, name, config, tokens, seconds):
    """An executor whose kernels aren't compiled yet, as the ranks see it."""
    time.sleep(60)
