"""Least squares of relative errors, with few coefficients, none below a least: what the cost model is fitted by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median


@dataclass(frozen=True)
class Fit:
    """Coefficients of a backend's terms, all at least 0, and how well they foretell a row that they weren't fitted to.

    Attributes:
        sms: generations whose rows it was fitted to; empty: coefficients of other backends stand in.
        formats: (SM, number format) of those rows.
        median_error, worst_error: relative, leaving each row out in turn.
    """

    coefficients: tuple[float, ...]
    sms: frozenset[int]
    median_error: float
    worst_error: float
    formats: frozenset[tuple[int, str]] = frozenset()


@dataclass(frozen=True)
class Sample:
    """One measured row: its generation, the values of its terms, microseconds; of an executor the weights' format, and
    the one that it keeps them in."""

    sm: int
    terms: tuple[float, ...]
    us: float
    format: str = ""
    kept: str = ""

    def left(self, least: Sequence[float]) -> float:
        """Share of the microseconds that the least coefficients leave to be explained."""
        return 1 - dot(least, self.terms) / self.us


def fit_of(samples: Sequence[Sample], least: Sequence[float]) -> Fit | None:
    """Fitted to the samples; None without enough of them to say anything of a sample left out."""
    if not samples or len(samples) < 2 * len(least):
        return None
    every = _Normal.of(samples, least)
    errors = [abs(dot(every.without(sample).solved(), sample.terms) / sample.us - 1) for sample in samples]
    sms = frozenset(sample.sm for sample in samples)
    formats = frozenset((sample.sm, sample.format) for sample in samples)
    return Fit(tuple(every.solved()), sms, median(errors), max(errors), formats)


@dataclass(frozen=True)
class _Normal:
    """The normal equations A x = b of samples: their terms, divided by their microseconds, should sum to 1.

    Least squares of the relative errors. Attributes: `least`, what no coefficient may fall below, and x counts from
    there; `squares`, the sum of what is left to explain, squared.
    """

    least: tuple[float, ...]
    A: list[list[float]]
    b: list[float]
    squares: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[Sample], least: Sequence[float]) -> _Normal:
        terms = len(least)
        empty = cls(tuple(least), [[0.0] * terms for _ in range(terms)], [0.0] * terms, 0.0, 0)
        for sample in samples:
            empty = empty.plus(sample, 1)
        return empty

    def without(self, sample: Sample) -> _Normal:
        return self.plus(sample, -1)

    def plus(self, sample: Sample, sign: int) -> _Normal:
        row, left = [value / sample.us for value in sample.terms], sample.left(self.least)
        A = [[a + sign * x * y for a, y in zip(line, row, strict=True)] for line, x in zip(self.A, row, strict=True)]
        b = [a + sign * x * left for a, x in zip(self.b, row, strict=True)]
        return _Normal(self.least, A, b, self.squares + sign * left**2, self.count + sign)

    def solved(self) -> list[float]:
        """Coefficients, none below its least. Of all subsets of terms that differ from it the one with the smallest
        Bayesian information criterion, so that a term that explains little stays out."""
        terms = range(len(self.b))
        best: tuple[float, list[float]] = (math.inf, list(self.least))
        for size in range(1, len(self.b) + 1):
            for chosen in combinations(terms, size):
                x = _solve([[self.A[i][j] for j in chosen] for i in chosen], [self.b[i] for i in chosen])
                if x is None or min(x) < 0:
                    continue
                missed = self.squares - sum(value * self.b[i] for value, i in zip(x, chosen, strict=True))
                criterion = self.count * math.log(max(missed, 1e-9) / self.count) + size * math.log(self.count)
                values = dict(zip(chosen, x, strict=True))
                best = min(best, (criterion, [low + values.get(i, 0.0) for i, low in enumerate(self.least)]))
        return best[1]


def _solve(A: list[list[float]], b: list[float]) -> list[float] | None:
    """x of A x = b, A symmetric and positive definite, by Gauss-Jordan elimination; None if it is singular."""
    n = len(b)
    scale = [math.sqrt(A[i][i]) or 1.0 for i in range(n)]  # a unit diagonal, so that one threshold fits all
    rows = [[A[i][j] / scale[i] / scale[j] for j in range(n)] + [b[i] / scale[i]] for i in range(n)]
    for i in range(n):
        if rows[i][i] < 1e-9:
            return None
        for k in range(n):
            if k != i:
                factor = rows[k][i] / rows[i][i]
                rows[k] = [x - factor * y for x, y in zip(rows[k], rows[i], strict=True)]
    return [rows[i][n] / rows[i][i] / scale[i] for i in range(n)]


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
