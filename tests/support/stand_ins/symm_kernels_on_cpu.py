"""The flags of the symm kernels under Triton's interpreter, which runs neither inline PTX nor two ranks at a time.

Ranks run one after another. A raise stores the flag at once; a wait is noted, as the ranks after this one have yet to
raise theirs, and `examine_waits` makes up for it when all have run. That is the order of a real run in which every rank
arrives in time. Both functions' own lines are executed (addresses, generation, R, what a fault is); of the two blocks
of PTX alone, Python says here what they do. Memory order, polling and time are not shown.
"""

from __future__ import annotations

import triton
import triton.language as tl

from eprt.dispatch.symm import kernels as symm_kernels

_wait_flags = symm_kernels._wait_flags
_noted = []


def _inline_asm(asm, constraints, args, dtype, is_pure, pack):
    """The two blocks of PTX: raise, and one look at the flags of a wait whose limit has passed."""
    flags = args[0].to(tl.pointer_type(tl.int64))
    if asm is symm_kernels._RAISE:
        tl.store(flags, args[1])
        return None
    assert asm is symm_kernels._WAIT, "another inline PTX: say here what it does"
    _, wanted, _, fault, host_fault = args
    found = tl.load(flags)
    for word in (fault, host_fault):
        tl.store(word.to(tl.pointer_type(tl.int32)), -1, mask=found < wanted)
    return found


@triton.jit
def _examine():
    for wait in _noted:
        _wait_flags(*wait)


def examine_waits() -> int:
    """Run the waits noted since the last call, which record faults where the kernels do. How many they were."""
    count = len(_noted)
    _examine[(1,)]()
    _noted.clear()
    return count


tl.inline_asm_elementwise = _inline_asm
symm_kernels._wait_flags = lambda *wait: _noted.append(wait)
