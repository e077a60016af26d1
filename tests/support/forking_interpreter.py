"""An interpreter to fork others from, for support/interpreters.py: `python -m ... LISTENER MODULE...`.

A fork is what its words say, as those of `python`. It ends as interpreters end, threads and atexit included, but
doesn't take apart what it shares with this process, object by object: that costs a second. One that `finalizes` does.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import types
from pathlib import Path

code: int | str | None = 0


def _leave() -> None:
    """Ends the process after every other function of atexit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if hasattr(sys, "last_value") or isinstance(code, str) else code or 0)


def _request(listener: socket.socket) -> tuple[dict, list[int]]:
    """Returns in a new process for each request; ends this one when standard input does."""
    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if 0 in ready:
            os._exit(0)
        asks, _ = listener.accept()
        raw, descriptors, _, _ = socket.recv_fds(asks, 1 << 20, 16)
        if os.fork() == 0:
            break
        for descriptor in (asks.detach(), *descriptors):
            os.close(descriptor)
    listener.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if child := os.fork():
        _tell_of(child, asks, descriptors)
    asks.close()
    return json.loads(raw), descriptors


def _tell_of(child: int, asks: socket.socket, descriptors: list[int]) -> None:
    try:
        for descriptor in descriptors:
            os.close(descriptor)
        asks.send(b"%d" % child)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        asks.send(b"%d" % ended)
    finally:
        os._exit(0)


def _settle(request: dict, descriptors: list[int]) -> None:
    """Gives this process the files, variables, folder and signals of the one that asked for it."""
    free = max([*request["files"], *descriptors]) + 1
    for index, descriptor in enumerate(descriptors):
        os.dup2(descriptor, free + index)
        os.close(descriptor)
    for index, number in enumerate(request["files"]):
        os.dup2(free + index, number)
        os.close(free + index)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = open(number, "w" if number else "r", buffering=1 if number == 2 else -1, closefd=False)  # noqa: SIM115
        vars(sys).update({name: stream, f"__{name}__": stream})
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # what was imported may have asked for that of other variables
    os.chdir(request["cwd"])
    if request["session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])


def _prepare() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    atexit.register(_leave)
    gc.disable()
    for name in ("support.interpreters", *sys.argv[2:]):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # else a fork's first collection would write to, and so copy, all that it shares


if __name__ == "__main__":
    _prepare()
    request, descriptors = _request(socket.socket(fileno=int(sys.argv[1])))
    gc.enable()
    _settle(request, descriptors)
    sys.modules["support.interpreters"].fork_servers()
    if request["finalizes"]:
        atexit.unregister(_leave)
        gc.unfreeze()
    sys.argv = request["words"]
    sys.path[0] = {"-c": "", "-m": request["cwd"]}.get(sys.argv[0], os.path.dirname(sys.argv[0]))
    main = sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
    try:
        if sys.argv[0] == "-m":
            runpy._run_module_as_main(sys.argv.pop(1))
        elif sys.argv[0] == "-c":
            exec(sys.argv.pop(1), vars(main))
        else:
            main.__file__ = sys.argv[0]
            exec(compile(Path(sys.argv[0]).read_text(), sys.argv[0], "exec"), vars(main))
    except SystemExit as leaves:
        code = leaves.code
        raise
