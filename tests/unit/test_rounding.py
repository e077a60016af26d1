from __future__ import annotations

import math

from eprt.rounding import ceil_div, next_power_of_2, round_up


def test_they_round_up():
    for n in range(1, 300):
        assert next_power_of_2(n) == 2 ** math.ceil(math.log2(n))
        assert [ceil_div(n, b) for b in (1, 2, 7, 256)] == [math.ceil(n / b) for b in (1, 2, 7, 256)]
        assert [round_up(n, b) for b in (1, 2, 7)] == [next(m for m in range(n, 400) if m % b == 0) for b in (1, 2, 7)]
    assert ceil_div(0, 8) == 0
    assert next_power_of_2((1 << 40) + 1) == 1 << 41
