"""Commands made of functions: parameters are the options, the docstring is the help page.

A parameter before the ``/`` is an argument, any other one an option. A parameter whose type is a
class of options (a dataclass, or a `TypedDict` of keyword arguments) stands for all options that
the docstring of the class describes; the command gets the object, or a dict of what was typed. In
numpydoc's ``name : SIZE``, SIZE is the metavar of the help page.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import is_dataclass
from functools import partial
from importlib import import_module
from inspect import Parameter
from itertools import chain
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import typer
from typer.core import TyperCommand, TyperGroup

from dsprep.cli.ending import reporting_errors
from dsprep.cli.report import Verbosity, count_bar, fail, note, say, say_asked, verbosity
from dsprep.errors import UsageError, near, require

if TYPE_CHECKING:
    from dsprep.formats.base import Source
    from dsprep.formats.options import OpenOptions

OPTION_NAMES = {
    "fields": ("--field", "-f"),
    "fields_a": ("--field-a",),
    "fields_b": ("--field-b",),
    "database": ("--db",),
    "skip_keys": ("--skip-key",),
    "records": ("--raw-records",),
    "recompose": ("--no-recompose",),
    "batch_size": ("--batch-size", "-M"),
    "buffer_size": ("--buffer-size", "-b"),
    "dry_run": ("--dry-run", "-n"),
    "epochs": ("--epochs", "-E"),
    "everything": ("--all",),
    "listed": ("--list",),
    "quiet": ("--quiet", "-q"),
    "ranks": ("--ranks", "-P"),
    "repeat": ("--repeat", "-r"),
    "strategies": ("--strategy", "--set", "-s"),
    "verbose": ("--verbose", "-v"),
    "cold": ("--warm",),
    "workers": ("--workers", "-j"),
}
"""Options whose names are not derived from their parameters alone."""

FLAG_VALUES = {
    "--raw-records": "opaque",
    "--no-recompose": False,
    "--warm": False,
}
"""Values of options that take none, if not True."""

PYTHON_ONLY = frozenset({"check_crc", "durable", "stop", "features", "key_format", "zarr_format"})
PYTHON_ONLY |= {"zarr_shard", "open_options", "write_options"}
"""Options of functions that the command line lacks."""

COMPLETIONS = {
    "to": ("dsprep.formats:WRITTEN",),
    "export": ("dsprep.sidecar.export:KINDS",),
    "name": ("dsprep.synth:names",),
    "strategies": ("dsprep.bench.strategies:STRATEGIES", "dsprep.bench.strategies:SETS"),
}
"""Completions of an option's value: lists of names, each as ``module:attribute``."""


class OutputOptions(NamedTuple):
    """The amount of output.

    Attributes
    ----------
    quiet
        No progress, and no report of what was done.
    verbose
        Also the time of each step and the causes of errors.
    """

    quiet: bool = False
    verbose: bool = False


_ParserError = cast("type[Exception]", typer.BadParameter.__mro__[1])
"""The parser's error for every mistake; its module differs between versions of typer."""


class Command(TyperCommand):
    """A command whose help page has examples first, and options by topic."""

    sections: Mapping[str, str]

    def get_params(self, ctx: Any) -> list[Any]:
        """Return all options and arguments."""
        return _keep_text(super().get_params(ctx))

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Write how the command is called."""
        arguments = [p for p in self.params if not p.opts[0].startswith("-")]
        shown = [p.metavar if p.required else f"[{p.metavar}]" for p in arguments]
        formatter.write_usage(ctx.command_path, " ".join([*map(str, shown), "[OPTIONS]"]))

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the description of the command, and examples."""
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(self.sections[""])
        with formatter.section("Examples"):
            for line in self.sections["Examples"].splitlines():
                formatter.write(f"  {line}\n" if line else "")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write options by topic."""
        panels = dict[str, list[tuple[str, str]]]()
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                name = record[0] if param.opts[0].startswith("-") else str(param.metavar)
                heading = getattr(param, "rich_help_panel", None) or "Options"
                panels.setdefault(heading, []).append((name, record[1]))
        for heading, records in panels.items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the notes."""
        formatter.write_paragraph()
        formatter.write_text(self.sections.get("Notes", ""))


def _keep_text(params: list[Any]) -> list[Any]:
    """Return options whose values stay text: typer converts by a package that is slow to import."""

    def take(param: Any, process: Callable[..., Any], ctx: Any, value: Any) -> Any:
        if param.required and not value:
            return process(ctx, value)  # which refuses it
        return value if param.callback is None else param.callback(ctx, param, value)

    for param in params:
        if "process_value" not in vars(param):
            param.process_value = partial(take, param, param.process_value)
    return params


class Entry(NamedTuple):
    """A command that is imported when it runs.

    Attributes
    ----------
    location
        ``module:attribute`` of the command.
    summary
        Its line in the help page of its group.
    """

    location: str
    summary: str


class Group(TyperGroup):
    """Commands that are imported when they run; a user's mistake is one line and exit code 2.

    Attributes
    ----------
    available
        The commands by name.
    """

    available: Mapping[str, Entry] = MappingProxyType({})

    def get_params(self, ctx: Any) -> list[Any]:
        """Return all options."""
        return _keep_text(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, without importing them."""
        return list(self.available)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import one command."""
        if (entry := self.available.get(cmd_name)) is not None and cmd_name not in self.commands:
            module, _, attribute = entry.location.partition(":")
            self.commands[cmd_name] = getattr(import_module(module), attribute)
        return self.commands.get(cmd_name)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, and options."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in self.available.items()])
        records = [param.get_help_record(ctx) for param in self.get_params(ctx)]
        with formatter.section("Options"):
            formatter.write_dl([record for record in records if record is not None])

    def main(self, args: Sequence[str] | None = None, *more: Any, **others: Any) -> NoReturn:
        """Run the command that the arguments name, and leave with its exit code."""
        try:
            code = super().main(args, *more, **{**others, "standalone_mode": False})
        except _ParserError as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                say(*str(error.args[0]).splitlines())
                sys.exit(2)
            context, words = getattr(error, "ctx", None), error.format_message()  # type: ignore[attr-defined]
            look = f"; see {context.command_path} --help" if context is not None else ""
            words = " ".join(words.split()).rstrip(".")
            say(f"dsprep: error: {words[:1].lower()}{words[1:]}{look}", err=True)
            sys.exit(2)
        sys.exit(code if isinstance(code, int) else 0)


def group(name: str, help: str, available: Mapping[str, Entry]) -> Group:
    """Return a group of commands."""
    made = Group(name=name, help=help, no_args_is_help=True, rich_markup_mode=None)
    made.available = available
    return made


def command(function: Callable[..., None]) -> Command:
    """Make a command of a function; its parameters become arguments and options."""
    hints, described = get_type_hints(function), _parameter_docs(function)
    parameters = inspect.signature(function).parameters
    kinds = {n: kind for n, kind in hints.items() if is_dataclass(kind) or is_typeddict(kind)}
    arguments = {n for n, p in parameters.items() if p.kind is p.POSITIONAL_ONLY}
    types, taken = {n: hints[n] for n in parameters if n not in kinds}, list[Parameter]()
    for name, hint in types.items():
        make = _argument if name in arguments else _option
        taken.append(make(name, hint, parameters[name].default, *described[name]))
    taken += [_option(n, bool, None, *words) for n, words in _parameter_docs(OutputOptions).items()]
    for kind in kinds.values():
        theirs, heading = _parameter_types(kind), _sections(kind.__doc__)[""].partition(".")[0]
        for name, words in _parameter_docs(kind).items():
            if name in theirs.keys() - PYTHON_ONLY - types.keys() and (
                name != "memory" or is_typeddict(kind)  # else of commands that have it themselves
            ):
                types[name] = theirs[name]
                default = vars(kind).get(name)
                taken.append(_option(name, theirs[name], default, *words, heading))

    def run(**given: Any) -> None:
        texts = {n: v for n, v in given.items() if v not in (None, False, [], ())}
        output = OutputOptions(*(texts.pop(n, False) for n in OutputOptions._fields))
        if output.quiet and output.verbose:
            fail("--quiet and --verbose contradict each other", 2)
        level = Verbosity(output.verbose - output.quiet)
        with verbosity(level), reporting_errors(), ExitStack() as stack:
            typed = {n: _parse_value(n, types[n], v) for n, v in texts.items()}
            if "executor" in types:
                typed["executor"] = _open_executor(typed, stack)
            values = {n: v for n, v in typed.items() if n in parameters}
            for name, kind in kinds.items():
                some = {n: v for n, v in typed.items() if n in _parameter_types(kind)}
                values[name] = some if is_typeddict(kind) else kind.of(**some)
            first = [values.pop(n, parameters[n].default) for n in parameters if n in arguments]
            function(*first, **values)
            say_asked()

    run.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in taken}
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(function.__name__.rstrip("_"), cls=Command)(run)
    made: Any = typer.main.get_command(app)
    made.sections = _sections(function.__doc__)
    made.help = made.sections[""]
    return cast("Command", made)


# --- options ---------------------------------------------------------------------------------


def _sections(text: str | None) -> dict[str, str]:
    """Return the sections of a docstring by their heading."""
    text = inspect.cleandoc(text or "")
    first, *rest = re.split(r"^(\w+)\n-+\n", text, flags=re.MULTILINE)
    return {"": first, **dict(zip(rest[::2], rest[1::2], strict=True))}


def _parameter_docs(kind: Any) -> dict[str, tuple[str, str]]:
    """Return metavar and help text of each parameter in a docstring."""
    described = dict[str, tuple[str, str]]()
    for each in reversed(kind.__mro__ if isinstance(kind, type) else (kind,)):
        sections = _sections(each.__doc__)
        text = sections.get("Parameters", sections.get("Attributes", ""))
        for block in re.split(r"\n(?=\S)", text.strip()) if text else ():
            names, _, words = block.partition("\n")
            names, _, metavar = names.partition(" : ")
            words = " ".join(words.replace("``", "").replace("`", "").split())
            described |= dict.fromkeys(names.split(", "), (metavar, words))
    return described


def _single_type(hint: Any) -> Any:
    """Return the type of one value: `str` if a union has it."""
    kinds = [k for k in get_args(hint) if k is not NoneType]
    if get_origin(hint) in (Union, UnionType):
        return str if str in kinds else _single_type(kinds[0])
    return hint


def _parameter_types(kind: Any) -> dict[str, Any]:
    """Return the types of parameters, without importing types that only functions take."""
    return get_type_hints(kind, localns=dict.fromkeys(("OpenOptions", "WriteOptions"), object))


def _metavar(name: str, hint: Any) -> str:
    """Return the default metavar of a parameter."""
    kind = _single_type(hint)
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return {int: "N", float: "X", Path: "FILE"}.get(kind, name.upper())


def _make_completer(names: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a function that completes a word, and imports the lists of names when called."""

    def complete(incomplete: str) -> list[str]:
        lists = [getattr(import_module(m), a) for m, _, a in (n.partition(":") for n in names)]
        known = chain.from_iterable(f() if callable(f) else f for f in lists)
        return [name for name in known if name.startswith(incomplete)]

    return complete


def _parameter(name: str, hint: Any, default: Any, how: Any) -> Parameter:
    """Return a parameter for typer: a flag, a text, or a list of texts."""
    kind: Any = _single_type(hint)
    missing: Any = None
    text: Any = str | None
    if kind is bool or OPTION_NAMES.get(name, "?")[0] in FLAG_VALUES:
        missing, text = False, bool
    elif get_origin(kind) in (list, tuple, Sequence, Mapping):
        text = list[str] | None
    given: Any = Parameter.empty if default is Parameter.empty else missing
    return Parameter(name, Parameter.KEYWORD_ONLY, default=given, annotation=Annotated[text, how])


def _option(
    name: str, hint: Any, default: Any, metavar: str, words: str, heading: str | None = None
) -> Parameter:
    """Return the option of a parameter."""
    names = OPTION_NAMES.get(name, ("--" + name.replace("_", "-"),))
    complete = _make_completer(COMPLETIONS[name]) if name in COMPLETIONS else None
    is_value = not isinstance(default, bool) and names[0] not in FLAG_VALUES
    if is_value and isinstance(default, (int, float, str)):
        words += f"  [default: {default}]"
    metavar = metavar or _metavar(name, hint)
    how = typer.Option(*names, help=words, metavar=metavar, rich_help_panel=heading)
    how.autocompletion, how.show_default = complete, False
    return _parameter(name, hint, default, how)


def _argument(name: str, hint: Any, default: Any, metavar: str, words: str) -> Parameter:
    """Return the argument of a parameter."""
    complete = _make_completer(COMPLETIONS[name]) if name in COMPLETIONS else None
    how = typer.Argument(metavar=metavar, help=words, show_default=False, autocompletion=complete)
    return _parameter(name, hint, default, how)


def _parse_value(name: str, hint: Any, value: Any) -> Any:
    """Return the value of an option given as text."""
    option, kind = OPTION_NAMES.get(name, ("--" + name.replace("_", "-"),))[0], _single_type(hint)
    if value is True:
        return FLAG_VALUES.get(option, True)
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        wrong, fix = f"{option} {value!r} is not understood", near(value, choices)
        require(value in choices, UsageError, wrong, expected=", ".join(choices), fix=fix)
    elif get_origin(kind) is Mapping:
        pairs = [text.rpartition("=") for text in value]
        require(all(n and v for n, _, v in pairs), UsageError, f"{option} takes NAME=VALUE")
        return {n: v for n, _, v in pairs}
    elif kind is Path:
        from dsprep.storage.paths import as_path

        return as_path(value)
    elif kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            expected = "a whole number" if kind is int else "a number"
            raise UsageError(f"{option} is {value[:40]!r}", expected=expected) from None
    return value


# --- values ----------------------------------------------------------------------------------


def _open_executor(given: Mapping[str, Any], stack: ExitStack) -> Executor | None:
    """Return the executor of a run; MPI ranks other than 0 do tasks and never return."""
    from dsprep.executors import opened
    from dsprep.executors.mpi import launched

    name = given.get("executor")
    if given.get("dry_run") and not launched():  # no workers are needed
        if name not in (None, "threads"):
            note(f"planned only: whether --executor {name} works here was not checked")
        return None
    executor = stack.enter_context(opened(name, workers=given.get("workers")))
    if (advice := getattr(executor, "advice", None)) is not None:
        note(advice)
    return executor


def sources_and_target(
    command: str, paths: Sequence[str], replacing: bool
) -> tuple[Sequence[str], str]:
    """Return the sources, and the last path, which is the output.

    Leaves the command if there is no source. Also if the output exists beside sources of its kind
    and is not to be replaced: with an unquoted pattern and no output, it is one of the sources.
    """
    from dsprep.storage.atomic import partial_path
    from dsprep.storage.paths import as_path

    if len(paths) < 2:
        fail(f"a source and a target are needed: dsprep {command} SRC... DST", 2)
    *_, source, last = map(as_path, paths)
    alike = source.suffix == last.suffix and source.parent.resolve() == last.parent.resolve()
    alike &= source.name != last.name  # which is refused for what it is
    if not replacing and alike and last.exists() and not partial_path(last).exists():
        fail(
            f"{last}: the last path is the output, and it exists already: add --overwrite to "
            "replace it, or name another output after the sources",
            1,
        )
    return paths[:-1], paths[-1]


def open_source(
    paths: Sequence[str],
    options: OpenOptions,
    show: bool,
    at: Path | None = None,
    *,
    marked: bool = False,
    inspected: int | None = None,
) -> Source:
    """Open a dataset, and show progress on stderr if it has many files."""
    from dsprep.source.dataset import open_dataset

    with count_bar("open", show) as update:
        return open_dataset(paths, options, update, at=at, marked=marked, inspected=inspected)
