"""`eprt generate` as torchrun starts it, whose rank 1 is killed in the second round of the first generation; rank 0 has
then written half a line more than it should have.

    torchrun ... killed_generate.py [arguments of eprt generate]
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from eprt.cli import generate as command
from eprt.cli import main

ROUND = 1


def kill_in_the_second_round(output: Path) -> None:
    generate, rounds = command.continue_share, [0]

    def killed(context: Any, **given: Any) -> Any:
        if rounds[0] == ROUND and context.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if rounds[0] == ROUND and context.rank == 0:
            with output.open("ab") as file:
                file.write(b'{"prompt": [7')
        rounds[0] += 1
        return generate(context, **given)

    command.continue_share = killed


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        kill_in_the_second_round(Path(arguments[arguments.index("--output") + 1]))
    sys.exit(main(["generate", *arguments]))
