"""How the command line explains itself: pages of ``--help``, and mistakes in options as one line.

Pages are the library's own: usage, what the command does, examples, and then the options by group.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from dsprep.cli.report import say
from dsprep.errors import UsageError, near

HDF5_ZARR, LMDB, TFRECORD = "HDF5 and Zarr", "LMDB", "TFRecord"
IMAGES, PARQUET = "Images", "Parquet"
"""Groups of options of one format."""

_Mistake = cast("type[Exception]", typer.BadParameter.__mro__[1])
"""What the parser raises for every mistake; its module differs between versions of typer."""


def _write_epilog(epilog: str | None, formatter: Any, *, examples: bool) -> None:
    """Write the examples of an epilog, or the rest of it."""
    remarks = (epilog or "").strip().split("\n\n")
    some = [words for words in remarks if words and words.startswith("dsprep ") == examples]
    if examples and some:
        with formatter.section("Examples"):
            for line in "\n".join(some).splitlines():
                formatter.write(f"  {line}\n")
    elif some:
        formatter.write_paragraph()
        formatter.write_text("\n\n".join(some))


def _write_options(params: Iterable[Any], ctx: Any, formatter: Any) -> None:
    """Write options by group."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for param in params:
        if (record := param.get_help_record(ctx)) is not None:
            panel = getattr(param, "rich_help_panel", None) or "Options"
            name = record[0] if param.opts[0].startswith("-") else param.metavar
            panels.setdefault(panel, []).append((name, record[1]))
    for panel, rows in panels.items():
        with formatter.section(panel):
            formatter.write_dl(rows)


class Command(TyperCommand):
    """A command whose page has examples, and options by group."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return all options and arguments."""
        return _without_pydantic(super().get_params(ctx))

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Write how the command is called."""
        arguments = [p for p in self.params if not p.opts[0].startswith("-")]
        shown = [p.metavar if p.required else f"[{p.metavar}]" for p in arguments]
        formatter.write_usage(ctx.command_path, " ".join([*map(str, shown), "[OPTIONS]"]))

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write what the command does, and examples."""
        super().format_help_text(ctx, formatter)
        _write_epilog(self.epilog, formatter, examples=True)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write options by group."""
        _write_options(self.get_params(ctx), ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write what else there is to say."""
        _write_epilog(self.epilog, formatter, examples=False)


class Entry(NamedTuple):
    """A command that is imported when it runs."""

    location: str
    """``module:attribute`` of what can be built (`dsprep.cli.options.command`), or of a group."""
    summary: str
    """The first paragraph of its help, shown by the page of its group."""


class Group(TyperGroup):
    """Commands that are imported when they run; a mistake of the user is one line and exit code 2.

    `available` are its commands.
    """

    available: Mapping[str, Entry] = MappingProxyType({})

    def get_params(self, ctx: Any) -> list[Any]:
        """Return all options."""
        return _without_pydantic(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, without importing them."""
        return list(self.available)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import one command."""
        if cmd_name not in self.commands and cmd_name in self.available:
            module, _, attribute = self.available[cmd_name].location.partition(":")
            command = getattr(import_module(module), attribute)
            self.commands[cmd_name] = command if isinstance(command, Group) else command.build()
        return self.commands.get(cmd_name)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, and options."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in self.available.items()])
        _write_options(self.get_params(ctx), ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that is meant; near names are proposed for one that there is not."""
        if args[0] not in self.available and not args[0].startswith("-"):
            proposal = near(args[0], self.available)
            raise UsageError(
                f"there is no command {args[0]!r}",
                fix=proposal or f"{ctx.command_path} --help lists them",
            )
        return super().resolve_command(ctx, args)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command that `args` name, and leave with its exit code."""
        given = list(sys.argv[1:] if args is None else args)
        try:
            code = super().main(given, prog_name, complete_var, standalone_mode=False, **extra)
        except UsageError as error:
            code, message = error.exit_code, str(error.args[0])
        except _Mistake as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                say(*str(error.args[0]).splitlines())
                sys.exit(2)
            code, message = 2, str(mistake(error, given).args[0])
        else:
            sys.exit(code if isinstance(code, int) else 0)
        say(f"dsprep: error: {message}", err=True)
        sys.exit(code)


def group(name: str, help: str, available: Mapping[str, Entry]) -> Group:
    """Return a group of commands."""
    made = Group(name=name, help=help, no_args_is_help=True, rich_markup_mode=None)
    made.available = available
    return made


# --- values ----------------------------------------------------------------------------------

_FOREIGN = object()
"""Stands for a value that is left to typer, which also words the errors."""

_WHOLE = re.compile("-?[0-9]{1,18}")
_DECIMAL = re.compile("-?[0-9]{1,18}(\\.[0-9]{1,18})?")


def _without_pydantic(params: Iterable[Any]) -> list[Any]:
    """Return options and arguments that convert plain values themselves.

    typer converts each value by pydantic, whose import takes longer than most commands.
    """
    params = list(params)
    for param in params:
        if "process_value" not in vars(param):
            param.process_value = partial(_process_value, param, param.process_value)
    return params


def _process_value(param: Any, process: Any, ctx: Any, value: Any) -> Any:
    """Convert the value of an option: a plain one at once, any other as typer does."""
    descriptor: Any = getattr(param, "type_descriptor", None)
    settings = getattr(descriptor, "parameter_info", None)  # other versions of typer lack it
    if settings is None or settings.parser is not None:
        return process(ctx, value)
    annotation: Any = descriptor.annotation
    if value is None:
        converted: Any = () if param.multiple or param.nargs == -1 else None
    elif get_origin(annotation) is list and isinstance(value, list | tuple):
        (kind,) = get_args(annotation)
        converted = [_plain(kind, item, settings) for item in value]
        if _FOREIGN in converted:
            converted = _FOREIGN
    else:
        converted = _plain(annotation, value, settings)
    if converted is _FOREIGN or (param.required and param.value_is_missing(converted)):
        return process(ctx, value)
    return converted if param.callback is None else param.callback(ctx, param, converted)


def _url(value: str) -> Path:
    from dsprep.errors import UsageError
    from dsprep.storage.paths import as_path

    try:
        return as_path(value)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from error


def _plain(kind: Any, value: Any, settings: Any) -> Any:
    """Return a value of a simple type if its text is a plain one, else `_FOREIGN`."""
    if kind is bool and type(value) is bool:
        return value
    if kind is str and type(value) is str and value.isprintable():
        return value
    if kind is Path and isinstance(value, str) and "://" in value:
        return _url(value)
    if kind is Path and isinstance(value, str | Path):
        readable = os.access(value, os.R_OK) or not os.path.lexists(value)
        return Path(value) if readable else _FOREIGN
    if get_origin(kind) is Literal:
        return value if value in get_args(kind) else _FOREIGN
    number: Any = _FOREIGN
    if kind in (int, float) and type(value) is kind:
        number = value
    elif type(value) is str and (
        (kind is int and _WHOLE.fullmatch(value)) or (kind is float and _DECIMAL.fullmatch(value))
    ):
        number = kind(value)
    if number is not _FOREIGN:
        low, high = settings.min, settings.max
        if (low is not None and number < low) or (high is not None and number > high):
            return _FOREIGN
    return number


# --- mistakes --------------------------------------------------------------------------------


_OF_NUMBERS = {
    "input should be a valid integer": "a whole number is expected",
    "input should be a valid number": "a number is expected",
}
"""What typer's words for values begin with, and what is said instead."""


def mistake(error: Any, args: Sequence[str]) -> UsageError:
    """Return what the parser found wrong with `args`, as the errors of dsprep say it."""
    path = error.ctx.command_path if error.ctx is not None else "dsprep"
    look = f"see {path} --help"
    words = error.message.removeprefix("Value error, ").rstrip(".")
    kind, option = type(error).__name__, getattr(error, "option_name", None)
    param = getattr(error, "param", None)
    if kind == "NoSuchOption":
        known = [o for p in error.ctx.command.params for o in (*p.opts, *p.secondary_opts)]
        fix = near(str(option), [o for o in known if o.startswith("--")]) or look
        return UsageError(f"there is no option {option}", fix=fix)
    if kind == "MissingParameter" and param is not None:
        name = longest(param.opts) if param.opts[0].startswith("-") else param.metavar
        return UsageError(f"{name} is missing", fix=look)
    if param is not None:
        name = longest(param.opts) if param.opts[0].startswith("-") else param.metavar
        value = given(param.opts, args)
        choices = words.partition(" is not one of ")[2].split("'")[1::2]
        if choices:
            proposal = near(value or "", choices)
            return UsageError(
                f"{name} {value!r} is not understood", expected=", ".join(choices), fix=proposal
            )
        words = words[:1].lower() + words[1:]
        for start, plain in _OF_NUMBERS.items():
            words = plain if words.startswith(start) else words
        return UsageError(f"{name}{'' if value is None else f' {value!r}'}: {words}", fix=look)
    if option is not None and "requires" in words:
        return UsageError(f"{option} needs a value", fix=look)
    return UsageError(words[:1].lower() + words[1:], fix=look)


def given(names: Sequence[str], args: Sequence[str]) -> str | None:
    """Return the last value that `args` have for an option, or None."""
    value = None
    for word, following in zip(args, [*args[1:], None], strict=True):
        name, equals, attached = word.partition("=")
        if name in names:
            value = attached if equals else following
        elif word[:2] in names and not word.startswith("--"):
            value = word[2:]
    return value


def longest(names: Iterable[str]) -> str:
    """Return the name of an option that says most."""
    return max(names, key=len)
