"""What a kernel became: compiled for a Hopper GPU without one, read as machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import get_cache_invalidating_env_vars, get_cache_key, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from eprt.launching import shared_cache

_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([^;]*);")
_TYPES = {"bfloat16": "bf16", "int32": "i32", "int64": "i64", "float32": "fp32", "float8_e4m3fn": "fp8e4nv"}
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)")
_WRITES_NOTHING = ("ST", "BAR", "BRA", "LDG", "WARPGROUP", "DEPBAR", "ISETP", "U", "MEMBAR", "FENCE", "NOP", "PLOP3")


@dataclass(frozen=True)
class Machine:
    """A kernel.

    Attributes:
        registers, stack, local: of a thread, the latter in bytes.  shared: bytes of a program.
        code: instructions in their order; labels as `.L_x_1:`.
    """

    registers: int
    stack: int
    local: int
    shared: int
    code: list[str]

    @property
    def loops(self) -> list[list[str]]:
        """Innermost loops that multiply."""
        labels = {line[:-1]: index for index, line in enumerate(self.code) if line.endswith(":")}
        spans = [
            (labels[target[1]], end)
            for end, line in enumerate(self.code)
            if (target := re.search(r"BRA.*`\((\.L_x_\d+)\)", line)) and labels.get(target[1], end) < end
        ]
        spans = [(a, b) for a, b in spans if "EXIT" not in self.code[a:b]]  # else a way back from code after the end
        spans = [(a, b) for a, b in spans if any("GMMA." in line for line in self.code[a:b])]
        inner = [(a, b) for a, b in spans if not any((c, d) != (a, b) and a <= c and d <= b for c, d in spans)]
        return [self.code[a : b + 1] for a, b in inner]


def count(code: list[str]) -> Counter[str]:
    """Instructions by their first word, without what follows its dots."""
    return Counter(re.split(r"[. ]", line, maxsplit=1)[0] for line in code if not line.endswith(":"))


def compiled(
    kernel: Any, args: tuple[Any, ...], options: dict[str, Any], before: Callable[[str], None] | None = None
) -> Machine:
    """`kernel[grid](*args, **options)` for sm_90a, in Triton or Gluon: tensors may be on any device. `before` gets
    Triton's key of it, for which nothing is compiled yet."""
    launch = {name: options[name] for name in ("num_warps", "num_stages", "maxnreg") if name in options}
    values = dict(zip(kernel.arg_names, args, strict=False)) | {k: v for k, v in options.items() if k not in launch}
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = values[name]
        if isinstance(value, GluonDescriptor):
            block = f"{_TYPES[str(value.base.dtype)[6:]]}{list(value.block_shape)}".replace(" ", "")
            signature[name] = f"tensordesc<{block},{value.layout!r}>"
        elif isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{_TYPES[str(value.base.dtype)[6:]]}{list(value.block_shape)}>"
        elif hasattr(value, "data_ptr"):
            signature[name] = "*" + _TYPES[str(value.dtype)[6:]]
            attributes[index,] = [["tt.divisibility", 16]]
        elif isinstance(value, int) and not kernel.params[index].is_constexpr and value != 1:
            signature[name] = "i32"
            attributes[index,] = [["tt.divisibility", 16]] if value % 16 == 0 else []
        else:
            signature[name] = "constexpr"
            constants[index,] = value
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", 90, 32)
    with shared_cache():  # else what the kernel is known by, and made with, follows what another test imported
        if before:
            backend = make_backend(target)
            parsed = backend.parse_options(launch | source.parse_options())
            before(get_cache_key(source, backend, parsed, env_vars=get_cache_invalidating_env_vars()))
        made = triton.compile(source, target=target, options=launch)
    return _read(made.asm["cubin"], made.metadata.shared)


def in_place_of_prepared(
    made: dict[str, Machine], before: Callable[[str], None] | None = None
) -> Callable[..., Callable[..., None]]:
    """Stands in for `eprt.launching.CachedKernel`: a call compiles, and `made` has the kernel by its name. `before`: of
    `compiled`."""

    def prepared(
        kernel: Any, device: Any, kinds: Any, constants: dict[str, Any], *, pdl: bool = False, **options: Any
    ) -> Any:
        def call(grid: Any, *arguments: Any) -> None:
            told = {"PDL": pdl} if "PDL" in kernel.arg_names else {}
            made[kernel.__name__] = compiled(kernel, arguments, {**constants, **told, **options}, before)

        return call

    return prepared


def _read(cubin: bytes, shared: int) -> Machine:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = _tool("nvdisasm", "-c", file.name)
        usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", _tool("cuobjdump", "-res-usage", file.name))
    assert usage
    code: list[str] = []
    for line in text.splitlines():
        if label := re.match(r"\.L_x_\d+:", line):
            code.append(label[0])
        elif instruction := _INSTRUCTION.search(line):
            code.append(instruction[1].strip())
    registers, stack, local = map(int, usage.groups())
    return Machine(registers, stack, local, shared, code)


def _tool(name: str, *args: str) -> str:
    return subprocess.run([_TOOLS / name, *args], check=True, capture_output=True, text=True).stdout


def accesses_to_barriers(code: list[str]) -> list[str]:
    """Returns the plain loads and stores of words of shared memory that a barrier was put into.

    They are its own until it is invalidated: when a GPU comes back from another process, such a word has the barrier's
    value again.
    """
    words = {at[1] for line in code if (at := re.match(r"SYNCS\.EXCH\.64 URZ, \[U?R\d+(\+0x[0-9a-f]+)\]", line))}
    return [
        line
        for line in code
        if re.match("LDS|STS", line) and (at := re.search(r"(\+0x[0-9a-f]+)\]", line)) and at[1] in words
    ]


def overwritten_operands(loop: list[str]) -> list[tuple[str, str]]:
    """(instruction, product): registers that are written while a product that reads them may be under way.

    wgmma reads its left operand from registers after it was issued: until a wait says that it is done, they are its
    own. The loop is walked three times, as a product may outlive its iteration.
    """
    flying: list[list[tuple[str, set[int]]]] = []
    begun: list[tuple[str, set[int]]] = []
    found = []
    for line in loop * 3:
        name, _, rest = line.partition(" ")
        if name.startswith(("HGMMA", "QGMMA")):
            operand = rest.split(",")[1].strip()
            begun.append((line, _registers(operand, 4)))
            if "gsb0" in rest:
                flying.append(begun)
                begun = []
        elif wait := _WAIT.match(line):
            pending = int(wait[1], 16)
            flying = flying[-pending:] if pending else []
        elif not name.startswith(_WRITES_NOTHING):
            width = 4 if ".128" in name else 2 if ".64" in name or "WIDE" in name else 1
            target = _registers(rest.split(",")[0].strip(), width)
            found += [(line, product) for group in [*flying, begun] for product, own in group if own & target]
    return found


def _registers(operand: str, width: int) -> set[int]:
    first = re.match(r"R(\d+)", operand)
    return set(range(int(first[1]), int(first[1]) + width)) if first else set()
