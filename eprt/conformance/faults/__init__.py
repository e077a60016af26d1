"""The fault matrix breaks one rank at one moment, and holds the others to what README promises.

A trial is a fresh world whose ranks run a layer step by step and check every output against the oracle. The victim
breaks as its row says. A trial passes if no survivor waits longer than the promise, all name the same rank and it is
the right one, no output was wrong, nothing is left over, and the survivors go on without the victim where they are to.
`eprt doctor --faults` runs them.
"""
