"""What imports what: one direction between packages, nothing heavy before it is needed."""

from __future__ import annotations

import ast
import functools
import json
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from support.processes import run_python

import eprt

ROOT = Path(eprt.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

# A module may import its own layer and those below it. The first prefix that fits names the layer.
LAYERS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (6, ("eprt.cli", "eprt.__main__", "eprt.bench", "eprt.integrations", "eprt.conformance", "eprt.diagnosis")),
    (5, ("eprt.models", "eprt.balance")),
    (4, ("eprt.layer",)),
    (3, ("eprt.graphs",)),
    (2, ("eprt.plan", "eprt.engines")),
    (1, ("eprt.dispatch", "eprt.experts")),
    (0, ("eprt",)),
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
HEAVY = ("flashinfer", "humming", "deep_ep", "triton", "cutlass", "transformers", "matplotlib", "rich", "tyro")


def name_of(path: Path) -> str:
    parts = ("eprt", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> int:
    for level, prefixes in LAYERS:
        if any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes):
            return level
    raise AssertionError(module)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imports(tree: ast.AST, *, inside_functions: bool, typing_only: bool = False) -> set[str]:
    """Modules that the code imports; `from eprt import x` counts as both eprt and eprt.x."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif (typing_only or not is_type_checking(node)) and (inside_functions or not isinstance(node, FUNCTIONS)):
            found |= imports(node, inside_functions=inside_functions, typing_only=typing_only)
    return found


KNOWN = {name_of(path) for path in MODULES} - {"eprt"}


@functools.cache
def eprt_imports(path: Path, *, typing_only: bool = False) -> frozenset[str]:
    """eprt modules (not names in them) that a file imports anywhere, functions included."""
    return frozenset(imports(ast.parse(path.read_text()), inside_functions=True, typing_only=typing_only) & KNOWN)


def test_imports_point_one_way() -> None:
    upward = [
        f"{module} (layer {layer_of(module)}) imports {name} (layer {layer_of(name)})"
        for path in MODULES
        if (module := name_of(path)) != "eprt"  # which hands out names from everywhere, lazily
        for name in sorted(eprt_imports(path))
        if layer_of(name) > layer_of(module)
    ]
    assert not upward, "\n".join(upward)


def test_dispatch_and_experts_never_import_each_other() -> None:
    for path in MODULES:
        module = name_of(path)
        for here, other in (("eprt.dispatch", "eprt.experts"), ("eprt.experts", "eprt.dispatch")):
            if module.startswith(here):
                crossing = [name for name in eprt_imports(path) if name.startswith(other)]
                assert not crossing, f"{module} imports {crossing}: they meet in eprt.tokens"


def test_no_circle_not_even_lazy_or_for_types_alone() -> None:
    """Typing-only and function-level imports count: whoever reads one file of a circle has to read them all."""
    arrows = {name_of(path): set(eprt_imports(path, typing_only=True) - {name_of(path)}) for path in MODULES}
    TopologicalSorter(arrows).prepare()  # raises CycleError, which names one's modules


def test_the_direction_test_can_fail() -> None:
    tree = ast.parse("def f():\n    from eprt.plan import make_plan\nif TYPE_CHECKING:\n    import eprt.layer")
    assert imports(tree, inside_functions=True) == {"eprt.plan", "eprt.plan.make_plan"}
    assert imports(tree, inside_functions=False) == set()
    assert layer_of("eprt.plan") > layer_of("eprt.dispatch.none")


def test_no_heavy_library_is_reached_by_imports_at_the_top_of_files() -> None:
    """From whatever answers before a backend is chosen; files of Triton kernels are imported inside functions."""
    files = {name_of(path): path for path in MODULES}
    light = {*eprt._MODULE.values(), "eprt.diagnosis", *(name for name in files if name.startswith("eprt.cli"))}
    light |= {name for name in files if name.startswith("eprt.models")}
    parsers = {"eprt.cli.arguments", "eprt.cli.parsing"}  # tyro is what they are for; `main` imports them
    light -= parsers
    reached: set[str] = set()
    while light:
        module = light.pop()
        reached.add(module)
        top = imports(ast.parse(files[module].read_text()), inside_functions=False)
        heavy = {name.split(".")[0] for name in top} & set(HEAVY)
        assert not heavy, f"{module} imports {heavy} at its top: import it inside the function that needs it"
        light |= (top & set(files)) - reached - parsers


def loaded_after(code: str) -> dict[str, float | list[str]]:
    """Top-level modules a fresh interpreter has after `code`, and the processor seconds of its parts."""
    report = "print(json.dumps({'modules': sorted({m.split('.')[0] for m in sys.modules}), **out}))"
    script = f"import sys, time, json\n{code}\n{report}"
    done = run_python("-c", script, check=True)
    return json.loads(done.stdout)


def test_neither_eprt_nor_what_starts_ranks_loads_torch_or_a_kernel_library() -> None:
    modules = loaded_after("import eprt, eprt.ranks.launcher; out = {}")["modules"]
    assert not set(modules) & {"torch", "numpy", *HEAVY}


def test_neither_public_names_nor_explain_load_a_kernel_library_and_names_cost_little_beside_torch() -> None:
    """One interpreter for both, as torch takes 2 s of it: what the names loaded is looked at by itself."""
    arguments = ["explain", "--model", "gpt-oss-20b", "--device", "sm90", "--json"]
    out = loaded_after(
        "import contextlib, io\n"
        "start = time.process_time(); import torch, torch.distributed.device_mesh\n"
        "torch_s = time.process_time() - start; before = set(sys.modules)\n"
        "packages_since = lambda: sorted({m.split('.')[0] for m in set(sys.modules) - before})\n"
        "start = time.process_time(); import eprt; [getattr(eprt, name) for name in dir(eprt)]\n"
        "eprt_s = time.process_time() - start; by_names = packages_since()\n"
        "from eprt.cli import main\n"
        f"with contextlib.redirect_stdout(io.StringIO()): code = main({arguments!r})\n"
        "out = {'torch_s': torch_s, 'eprt_s': eprt_s, 'code': code,"
        " 'by_names': by_names, 'by_both': packages_since()}"
    )
    assert not set(out["by_names"]) & set(HEAVY)
    assert out["eprt_s"] < 0.3 * out["torch_s"], out
    assert out["code"] == 0
    assert not set(out["by_both"]) & {"flashinfer", "humming", "deep_ep", "triton", "cutlass", "transformers"}


def test_help_and_wrong_arguments_answer_without_torch() -> None:
    for arguments, code in (
        (["--help"], 0),
        (["run", "--help"], 0),
        (["bench", "dispatch", "--help"], 0),
        (["rum"], 2),
    ):
        out = loaded_after(
            "import contextlib, io\nfrom eprt.cli import main\n"
            "with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):\n"
            f"    try: main({arguments!r})\n"
            "    except SystemExit as stop: out = {'code': stop.code or 0}"
        )
        assert out["code"] == code
        assert "torch" not in out["modules"]


def test_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Wrold'"):
        _ = eprt.Wrold
    assert "World" in dir(eprt)
