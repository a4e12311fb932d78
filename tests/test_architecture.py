"""The structure holds: imports go one way, start-up is light, only the command line prints."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import dsprep
from dsprep import formats

ROOT = Path(dsprep.__file__).parent
HEAVY = ("h5py", "lmdb", "zarr", "tensorflow", "torch", "jax", "numcodecs", "ml_dtypes")

# A folder may import from those before it, and from itself.
FOLDERS = [
    *(
        "errors",
        "core",
        "storage",
        "executors",
        "layout",
        "reading",
        "formats",
        "sidecar",
        "source",
    ),
    *(
        "writing",
        "synth",
        "cache",
        "reader",
        "planning",
        "repeats",
        "decode",
        "torch",
        "lightning",
        "transformers",
        "tf",
        "jax",
        "verbs",
        "bench",
        "cli",
    ),
    "__main__",
]


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imported(path):
    """Names below dsprep that a module imports, wherever in it; not for type checking only."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            if node.module == "dsprep":
                yield from (a.name for a in node.names)
            elif node.module.startswith("dsprep."):
                inside = node.module.removeprefix("dsprep.")
                for a in node.names:
                    below = (ROOT / inside.replace(".", "/") / f"{a.name}.py").exists()
                    yield f"{inside}.{a.name}" if below else inside
        elif isinstance(node, ast.Import):
            yield from (
                a.name.removeprefix("dsprep.") for a in node.names if a.name.startswith("dsprep.")
            )


@pytest.mark.parametrize(("name", "path"), [m for m in modules() if m[0]], ids=lambda v: str(v))
def test_imports_go_one_way(name, path):
    own = FOLDERS.index(name.split(".")[0])
    for other in imported(path):
        if other != "__version__":
            assert FOLDERS.index(other.split(".")[0]) <= own, f"{name} imports {other}"


def test_no_modules_import_each_other_in_a_circle():
    known = {name: path for name, path in modules() if name}
    graph = {
        name: {m for m in imported(path) if m in known} - {name} for name, path in known.items()
    }
    assert len(list(TopologicalSorter(graph).static_order())) == len(graph)


def test_formats_do_not_know_each_other():
    names = [p.name for p in (ROOT / "formats").iterdir() if (p / "__init__.py").exists()]
    assert len(names) >= 4
    for name, path in modules():
        own = name.split(".")[1] if name.startswith("formats.") and name.count(".") else None
        if own not in names:
            continue
        for other in imported(path):
            assert not any(
                other == f"formats.{n}" or other.startswith(f"formats.{n}.")
                for n in names
                if n != own
            ), f"{name} imports {other}"


@pytest.mark.parametrize(
    "command",
    ["import dsprep", "import dsprep.synth", "from dsprep.cli import app; app(['--help'])"],
)
def test_start_up_is_light(command):
    code = f"""
import sys
try:
    {command}
except SystemExit:
    pass
print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_recognising_a_format_is_light(tmp_path):
    file = tmp_path / "x"
    file.write_bytes(b"nothing known" * 10)
    code = f"""
import sys
from dsprep import formats
from dsprep.errors import FormatError
from pathlib import Path
try:
    formats.recognise(Path({str(file)!r}))
except FormatError:
    print([m for m in {HEAVY!r} if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_only_the_command_line_prints():
    for name, path in modules():
        if name.startswith("cli"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            assert not (called and node.func.id == "print"), f"{name}:{node.lineno}"


def test_one_place_of_the_command_line_prints():
    for name, path in modules():
        if not name.startswith("cli"):
            continue
        allowed = {"say": {"typer.echo"}, "say_json": {"typer.echo"}, "_bar": {"Console"}}
        tree = ast.parse(path.read_text())
        inside = {
            id(child): function.name
            for function in ast.walk(tree)
            if name == "cli.report" and isinstance(function, ast.FunctionDef)
            for child in ast.walk(function)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                writes = called in ("print", "Console")
                writes |= called.endswith((".write", ".secho", ".echo", ".Console"))
                writes &= called not in allowed.get(inside.get(id(node), ""), ())
                assert not writes or called in ("file.write", "formatter.write", "made.write"), (
                    f"{name}:{node.lineno}: {called}"
                )


def test_lines_that_are_said_are_lines():
    """A newline inside one would be printed as an escape."""
    for name, path in modules():
        for node in ast.walk(ast.parse(path.read_text())) if name.startswith("cli") else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("say", "note", "remark"):
                texts = (c.value for a in node.args for c in _pieces(a))
                assert not any("\n" in str(text) for text in texts), f"{name}:{node.lineno}"


def _pieces(argument):
    """Constants of which a text is made, not those that it is joined or split by."""
    values = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
    return [v for v in values if isinstance(v, ast.Constant)]


def test_nothing_is_unpickled_or_evaluated():
    for name, path in modules():
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {a.name for a in node.names} | {getattr(node, "module", None)}
                assert not names & {"marshal", "shelve", "dill", "cloudpickle"}, name
                assert "pickle" not in names or name.startswith("synth."), name  # it writes some
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), f"{name}:{node.lineno}"
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle":
                assert node.attr == "dumps", f"{name}:{node.lineno}"


def test_public_names_exist():
    for name in dsprep.__all__:
        assert getattr(dsprep, name) is not None
    with pytest.raises(AttributeError):
        dsprep.nosuch  # noqa: B018


NAMES = ["errors", "executors", "repeats", "decode", "torch", "lightning", "transformers"]
NAMES += ["tf", "jax"]


@pytest.mark.parametrize("name", NAMES)
def test_public_modules_are_there_after_the_import_of_dsprep(name):
    """Whatever else was imported; one that lacks its framework says so."""
    code = (
        f"import dsprep\ntry: assert dsprep.{name}.__name__ == 'dsprep.{name}'\n"
        "except dsprep.errors.MissingExtra as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stdout or f"dsprep.{name} needs" in done.stdout


def test_only_storage_reads_by_pread():
    """A bare call may return fewer bytes than it was asked for: `dsprep.storage.ranges` loops."""
    for name, path in modules():
        if name == "storage.ranges":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                found = ast.unparse(node)
            elif isinstance(node, ast.ImportFrom) and node.module == "os":
                found = " ".join(f"os.{a.name}" for a in node.names)
            else:
                continue
            banned = {"os.pread", "os.preadv", "os.pwrite", "os.pwritev", "os.copy_file_range"}
            assert not banned & set(found.split()), f"{name}:{node.lineno}"
            bare = found in ("libc.preadv", "libc.pread") and name != "storage.scatter"
            assert not bare, f"{name}:{node.lineno}"


NAMING = {
    "sidecar.export.dali_idx": "DALI's index is one of TFRecord files",
    "bench.strategies": "a strategy reads files of one format, by its library",
    "synth": "real datasets are of one format each",
}
"""Modules outside of the formats that may name one, and why."""


def test_no_format_is_named_outside_of_the_formats():
    names = set(formats.FORMATS)
    for name, path in modules():
        if name.startswith("formats") or any(f"{name}.".startswith(f"{n}.") for n in NAMING):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            said = isinstance(node, ast.Constant) and node.value in names
            assert not said, f"{name}:{node.lineno} says {node.value!r}"
        for other in imported(path):
            assert not (other.startswith("formats.") and other.split(".")[1] in names), name


def test_a_format_is_six_methods():
    known = {**vars(formats.base.Format), **vars(formats.base.WritableFormat)}
    methods = {n for n, v in known.items() if callable(v) and n[0] != "_"}
    assert len(methods) <= 6
    for name in formats.FORMATS:
        own = {n for n, v in vars(type(formats.load(name))).items() if callable(v) and n[0] != "_"}
        assert own <= methods


def functions():
    for name, path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, node


COMMANDS = {
    *("convert", "repack", "provenance", "audit", "verify", "synth", "stage"),
    *("inspect", "storage", "plan"),
}
"""Functions that take as many arguments as their commands have options."""


def test_functions_are_short():
    """Sixty lines with the docstring, eight parameters: but those that users call."""
    for name, node in functions():
        if node.name in COMMANDS and name.split(".")[0] in ("cli", "verbs", "writing", "synth"):
            continue
        doc = ast.get_docstring(node, clean=False)
        lines = node.end_lineno - node.lineno + 1
        public = doc is not None and "Parameters\n" in doc
        assert lines <= 60 or (public and lines - doc.count("\n") <= 60), f"{name}.{node.name}"
        args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count = len([a for a in args if a.arg not in ("self", "cls")])
        assert count <= 8 or (name, node.name) == ("reader.loader", "__init__"), node.name
