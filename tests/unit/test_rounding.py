from __future__ import annotations

import math

from eprt.rounding import ceil_div, next_power_of_2


def test_they_round_up():
    for n in range(1, 300):
        assert next_power_of_2(n) == 2 ** math.ceil(math.log2(n))
        assert [ceil_div(n, b) for b in (1, 2, 7, 256)] == [math.ceil(n / b) for b in (1, 2, 7, 256)]
    assert ceil_div(0, 8) == 0
    assert next_power_of_2((1 << 40) + 1) == 1 << 41
