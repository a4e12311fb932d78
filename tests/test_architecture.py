"""The structure holds: imports go one way, start-up is light, only the command line prints."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import dsprep
from dsprep import formats

ROOT = Path(dsprep.__file__).parent
HEAVY = ("h5py", "lmdb", "zarr", "tensorflow", "torch", "jax", "numcodecs", "ml_dtypes")

# A folder may import from those before it, and from itself.
ORDER = """
errors core storage executors layout reading formats sidecar source writing synth cache reader
planning repeats decode torch lightning transformers tf jax verbs bench cli __main__
"""
FOLDERS = ORDER.split()


@cache
def modules():
    """The nodes of the syntax tree of each module, by its name below dsprep."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = [*ast.walk(ast.parse(path.read_text()))]
    return found


def nodes(*kinds):
    """Yield the nodes of these kinds with the names of their modules."""
    for name, tree in modules().items():
        yield from ((name, node) for node in tree if isinstance(node, kinds))


@cache
def imported(name):
    """Names below dsprep that a module imports, wherever in it; not for type checking only."""
    tree, found = modules()[name], []
    skipped = {
        id(child)
        for node in tree
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    for node in tree:
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "dsprep":
            found += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dsprep."):
            inside = node.module.removeprefix("dsprep.")
            below = [f"{inside}.{a.name}" for a in node.names]
            found += [each if each in modules() else inside for each in below]
        elif isinstance(node, ast.Import):
            found += [
                a.name.removeprefix("dsprep.") for a in node.names if a.name.startswith("dsprep.")
            ]
    return found


def test_imports_go_one_way():
    for name in filter(None, modules()):
        own = FOLDERS.index(name.split(".")[0])
        for other in imported(name):
            if other != "__version__":
                assert FOLDERS.index(other.split(".")[0]) <= own, f"{name} imports {other}"


def test_no_modules_import_each_other_in_a_circle():
    known = {*modules()} - {""}
    graph = {name: ({*imported(name)} & known) - {name} for name in known}
    assert len(list(TopologicalSorter(graph).static_order())) == len(graph)


def test_formats_do_not_know_each_other():
    names = {p.name for p in (ROOT / "formats").iterdir() if (p / "__init__.py").exists()}
    assert len(names) >= 4
    for name in modules():
        folder, _, own = name.partition(".")
        if folder == "formats" and own.split(".")[0] in names:
            others = names - {own.split(".")[0]}
            met = [m for m in imported(name) if {*m.split(".")[1:2]} & others]
            assert not [m for m in met if m.startswith("formats.")], name


def test_start_up_is_light(tmp_path):
    """The import, the help, and recognising a format load no library of a format."""
    (tmp_path / "x").write_bytes(b"nothing known" * 10)
    code = f"""
import sys
from pathlib import Path
def light(what):
    assert not [m for m in {HEAVY!r} if m in sys.modules], what
import dsprep
light("dsprep")
from dsprep.cli import app
try:
    app(["--help"])
except SystemExit:
    light("--help")
import dsprep.synth
light("synth")
from dsprep import formats
try:
    formats.recognise(Path({str(tmp_path / "x")!r}))
except dsprep.DsprepError:
    light("recognise")
    print("done", file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "done\n"


def test_one_place_of_the_command_line_prints():
    allowed = {"say": {"typer.echo"}, "say_json": {"typer.echo"}, "_bar": {"Console"}}
    inside = {
        id(child): function.name
        for function in modules()["cli.report"]
        if isinstance(function, ast.FunctionDef)
        for child in ast.walk(function)
    }
    for name, node in nodes(ast.Call):
        if name.startswith("cli"):
            called = ast.unparse(node.func)
            writes = called in ("print", "Console")
            writes |= called.endswith((".write", ".secho", ".echo", ".Console"))
            writes &= called not in allowed.get(inside.get(id(node), ""), ())
            assert not writes or called in ("file.write", "formatter.write", "made.write"), (
                f"{name}:{node.lineno}: {called}"
            )


def test_public_names_exist():
    for name in dsprep.__all__:
        assert getattr(dsprep, name) is not None
    with pytest.raises(AttributeError):
        dsprep.nosuch  # noqa: B018


NAMES = ["errors", "executors", "repeats", "decode", "torch", "lightning", "transformers", "jax"]


def test_public_modules_are_there_after_the_import_of_dsprep():
    """One that lacks its framework says so."""
    code = f"""
import dsprep
for name in {NAMES!r}:
    try:
        assert getattr(dsprep, name).__name__ == f"dsprep.{{name}}"
    except dsprep.errors.MissingExtra as error:
        assert f"dsprep.{{name}} needs" in str(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


NAMING = {
    "sidecar.export.dali_idx": "DALI's index is one of TFRecord files",
    "bench.strategies": "a strategy reads files of one format, by its library",
    "synth": "real datasets are of one format each",
}
"""Modules outside of the formats that may name one, and why."""


def test_no_format_is_named_outside_of_the_formats():
    names = set(formats.FORMATS)
    for name, tree in modules().items():
        if name.startswith("formats") or any(f"{name}.".startswith(f"{n}.") for n in NAMING):
            continue
        for node in tree:
            said = isinstance(node, ast.Constant) and node.value in names
            assert not said, f"{name}:{node.lineno} says {node.value!r}"
        for other in imported(name):
            assert not (other.startswith("formats.") and other.split(".")[1] in names), name


def test_a_format_is_seven_methods():
    known = {**vars(formats.base.Format), **vars(formats.base.WritableFormat)}
    methods = {n for n, v in known.items() if callable(v) and n[0] != "_"}
    assert len(methods) <= 7
    for name in formats.FORMATS:
        own = {n for n, v in vars(type(formats.load(name))).items() if callable(v) and n[0] != "_"}
        assert own <= methods


COMMANDS = {
    *("convert", "repack", "provenance", "audit", "verify", "synth", "stage"),
    *("inspect", "storage", "plan", "read"),
}
"""Functions that take as many arguments as their commands have options."""


def test_functions_are_short():
    """Sixty lines with the docstring, eight parameters: but those that users call."""
    for name, node in nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        if node.name in COMMANDS and name.split(".")[0] in ("cli", "verbs", "writing", "synth"):
            continue
        doc = ast.get_docstring(node, clean=False)
        lines = node.end_lineno - node.lineno + 1
        public = doc is not None and "Parameters\n" in doc
        assert lines <= 60 or (public and lines - doc.count("\n") <= 60), f"{name}.{node.name}"
        args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count = len([a for a in args if a.arg not in ("self", "cls")])
        assert count <= 8 or (name, node.name) == ("reader.loader", "__init__"), node.name
