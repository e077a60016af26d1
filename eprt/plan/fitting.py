"""Fits the cost model: least squares of relative errors with few coefficients, none of them below a least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

TIE = 1e-9  # of the criterion: where one shape makes two terms proportional, the later one is taken
SINGULAR = 1e-9  # least eigenvalue, of normal equations scaled to a unit diagonal


@dataclass(frozen=True)
class Fit:
    """Coefficients of a backend's terms, all at least 0, and how well they predict a row that they weren't fitted to.

    Attributes:
        formats: (SM, number format) of the rows that it was fitted to; empty: coefficients of other backends stand in.
        median_error, worst_error: relative, leaving each row out in turn.
    """

    coefficients: tuple[float, ...]
    formats: frozenset[tuple[int, str]]
    median_error: float
    worst_error: float


@dataclass(frozen=True)
class Sample:
    """One measured row: its generation, the values of its terms, microseconds.

    Attributes:
        format, kept: of an executor's row, the weights' number format and the one that the executor keeps them in.
    """

    sm: int
    terms: tuple[float, ...]
    us: float
    format: str = ""
    kept: str = ""


def fit_of(samples: Sequence[Sample], least: Sequence[float]) -> Fit | None:
    """Returns the fit to all samples; None if they are too few to say anything of a sample left out.

    Args:
        least: what no coefficient may fall below.
    """
    if not samples or len(samples) < 2 * len(least):
        return None
    us, terms = np.array([sample.us for sample in samples]), np.array([sample.terms for sample in samples])
    every = _coefficients(terms / us[:, None], np.array(least))
    errors = np.abs((every[:-1] * terms).sum(1) / us - 1)
    formats = frozenset((sample.sm, sample.format) for sample in samples)
    return Fit(tuple(every[-1].tolist()), formats, float(np.median(errors)), float(errors.max()))


def _coefficients(rows: np.ndarray, least: np.ndarray) -> np.ndarray:
    """Returns [N + 1, terms] coefficients: line i of a fit without row i, the last of a fit to all N rows.

    The rows [N, terms] are terms over microseconds, so that each should sum to 1. Of all subsets of terms that differ
    from their least, each fit takes the one with the smallest Bayesian information criterion: a term that explains
    little stays out.
    """
    (N, terms), left = rows.shape, 1 - rows @ least  # the share that the least coefficients leave to be explained
    without = np.concatenate([np.eye(N), np.zeros((1, N))])  # [fit, row]: which row a fit leaves out
    A = rows.T @ rows - np.einsum("fn,ni,nj->fij", without, rows, rows)
    b = rows.T @ left - without @ (rows * left[:, None])
    squares, count = left @ left - without @ left**2, N - without.sum(1)
    best, found = np.full(N + 1, np.inf), np.tile(least, (N + 1, 1))
    for size in range(1, terms + 1):
        for chosen in map(list, combinations(range(terms), size)):
            x = _solved(A[:, chosen][:, :, chosen], b[:, chosen])
            missed = squares - (x * b[:, chosen]).sum(1)
            criterion = count * np.log(np.maximum(missed, 1e-9) / count) + size * np.log(count)
            better = np.isfinite(x).all(1) & (x.min(1) >= 0) & (criterion < best + TIE)
            best[better], found[better] = criterion[better], least
            found[np.ix_(better, chosen)] += x[better]
    return found


def _solved(A: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns [fits, n] x of A x = b, NaN where A [fits, n, n] is singular."""
    scale = np.sqrt(np.maximum(np.diagonal(A, axis1=1, axis2=2), np.finfo(float).tiny))
    unit = A / scale[:, :, None] / scale[:, None, :]
    singular = np.linalg.eigvalsh(unit)[:, 0] < SINGULAR
    unit[singular] = np.eye(b.shape[1])
    x = np.linalg.solve(unit, (b / scale)[:, :, None])[:, :, 0] / scale
    x[singular] = np.nan
    return x
