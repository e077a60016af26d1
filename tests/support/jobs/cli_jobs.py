"""Jobs for test_cli.py: the command in ranks that torchrun could have started."""

from __future__ import annotations

import os

from eprt.cli import main


def command(context, words):
    """`eprt` with this rank's words, to the end of the process."""
    os._exit(main(words[context.rank]))
