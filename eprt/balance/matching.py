"""Finds places for experts near those that they have: ranks for ranks' shares, slots on a rank."""

from __future__ import annotations

from eprt.placement import EMPTY


def matched(score: list[list[int]]) -> list[tuple[int, int]]:
    """Returns pairs (row, column), each once, the best pair first."""
    size = range(len(score))
    rows, columns = set(size), set(size)
    found: list[tuple[int, int]] = []
    for row, column in sorted(((r, c) for r in size for c in size), key=lambda rc: (-score[rc[0]][rc[1]], rc)):
        if row in rows and column in columns:
            found.append((row, column))
            rows.remove(row)
            columns.remove(column)
    return found


def in_place(experts: list[int], now: list[int]) -> list[int]:
    """Orders `experts`, each as often as before, so that those already there keep their slots."""
    left = list(experts)
    slots = [EMPTY] * len(now)
    open_slots: list[int] = []
    for slot, expert in enumerate(now):
        if expert != EMPTY and expert in left:
            slots[slot] = expert
            left.remove(expert)
        else:
            open_slots.append(slot)
    for slot, expert in zip(open_slots, sorted(left, key=lambda e: (e == EMPTY, e)), strict=True):
        slots[slot] = expert
    return slots
