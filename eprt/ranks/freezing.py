"""Exempts from garbage collection what this process has imported by now: a server of ranks imports this module last.

A rank forked from it neither looks through all of that in each collection nor copies its pages by writing to them.
"""

import gc

gc.freeze()
