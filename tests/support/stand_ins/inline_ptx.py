"""Executes the instructions of our kernels' inline PTX with numpy, as Triton's interpreter knows none.

A register holds 32 bits of every element as uint32, or the 16 that `mov` takes out of them. What rounds on a GPU rounds
here, to nearest and ties to even; `approx` is exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import numpy as np

Bits = np.ndarray


def execute(asm: str, arguments: list[np.ndarray]) -> np.ndarray:
    """Returns $0 as uint32. $1, $2, ... are arrays of 32-bit elements, which are broadcast. No text returns $1."""
    registers = {f"${number}": bits.view(np.uint32) for number, bits in enumerate(arguments, 1)}
    registers["$0"] = registers["$1"]
    for operation, (target, *sources) in _instructions(asm):
        found = operation(*(_read(registers, source) for source in sources))
        if target.startswith("{"):
            low, high = _names(target)
            registers |= {low: found & np.uint32(0xFFFF), high: found >> np.uint32(16)}
        else:
            registers[target] = found
    return registers["$0"]


@cache
def _instructions(asm: str) -> list[tuple[Callable[..., Bits], list[str]]]:
    lines = [" ".join(line.split()) for line in re.sub(r"^\{(.*)\}$", r"\1", asm.strip(), flags=re.S).split(";")]
    split = [line.partition(" ") for line in lines if line and not line.startswith(".reg")]
    return [(_OPERATIONS[name], re.findall(r"\{.*?\}|[^\s,]+", operands)) for name, _, operands in split]


def _names(pair: str) -> list[str]:
    return pair.strip("{}").replace(",", " ").split()


def _read(registers: dict[str, Bits], operand: str) -> Bits:
    if operand.startswith("{"):
        low, high = (registers[name] for name in _names(operand))
        return low | high << np.uint32(16)
    if operand in registers:
        return registers[operand]
    return np.array(int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0), np.uint32)


def _floats(operation: Callable[..., np.ndarray]) -> Callable[..., Bits]:
    """Makes an operation on float32 one on bits."""
    return lambda *bits: operation(*(each.view(np.float32) for each in bits)).view(np.uint32)


def _bfloats(operation: Callable[..., np.ndarray]) -> Callable[..., Bits]:
    """Makes an operation on float32 one on two bf16 a register. Results are rounded once, as float32 holds them exactly
    but for sums of far apart numbers."""

    def of_pairs(*pairs: Bits) -> Bits:
        low = _rounded(operation(*((each << np.uint32(16)).view(np.float32) for each in pairs)))
        high = _rounded(operation(*((each & np.uint32(0xFFFF0000)).view(np.float32) for each in pairs)))
        return low >> np.uint32(16) | high & np.uint32(0xFFFF0000)

    return of_pairs


def _rounded(values: np.ndarray) -> Bits:
    bits = values.view(np.uint32)
    return bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))


def _table(a: Bits, b: Bits, c: Bits, truth: Bits) -> Bits:
    """Returns, bit by bit, the entry of an 8-bit table whose number is (a, b, c)."""
    chosen = np.zeros_like(a & b & c)
    for entry in range(8):
        if int(truth) >> entry & 1:
            chosen |= (a if entry & 4 else ~a) & (b if entry & 2 else ~b) & (c if entry & 1 else ~c)
    return chosen


def _permuted(low: Bits, high: Bits, selector: Bits) -> Bits:
    """Returns a byte of (low, high) for each of the selector's four lower nibbles; one above 7 would ask for a sign."""
    chosen = np.zeros_like(low & high & selector)
    for byte in range(4):
        index = selector >> np.uint32(4 * byte) & np.uint32(15)
        if index.size and index.max() > 7:
            raise NotImplementedError("prmt with a sign")
        word = np.where(index < 4, low, high)
        chosen |= (word >> (index % np.uint32(4) * np.uint32(8)) & np.uint32(0xFF)) << np.uint32(8 * byte)
    return chosen


_OPERATIONS: dict[str, Callable[..., Bits]] = {
    "mov.b32": lambda bits: bits,
    "lop3.b32": _table,
    "prmt.b32": _permuted,
    "mul.bf16x2": _bfloats(np.multiply),
    "sub.bf16x2": _bfloats(np.subtract),
    "fma.rn.bf16x2": _bfloats(lambda a, b, c: a * b + c),
    "mul.f32": _floats(np.multiply),
    "add.f32": _floats(np.add),
    "ex2.approx.ftz.f32": _floats(np.exp2),
    "rcp.approx.ftz.f32": _floats(np.reciprocal),
}
