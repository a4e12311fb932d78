"""How the command line explains itself: pages of ``--help``, and mistakes in options as one line.

Pages are plain text of at most 80 columns: usage, what the command does, examples, and then the
options by group. Of those of one format the page has the names; ``--help FORMAT`` explains them.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from enum import Enum
from itertools import pairwise
from typing import Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from dsprep.cli.report import say
from dsprep.errors import UsageError

HDF5_ZARR, LMDB, TFRECORD = "HDF5 and Zarr", "LMDB", "TFRecord"
IMAGES, PARQUET = "Images", "Parquet"
"""Groups of options of one format."""

OF_FORMATS = (HDF5_ZARR, LMDB, TFRECORD, IMAGES, PARQUET)

WIDTH = 80
LEFT = 26
"""Columns of the names of options, beside which their explanation stands."""

_Mistake = cast("type[Exception]", typer.BadParameter.__mro__[1])
"""What the parser raises for every mistake; its module differs between versions of typer."""


class Command(TyperCommand):
    """A command that explains itself as `page` does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Explain the options of a format where ``--help`` is followed by its name."""
        for word, following in pairwise(args):
            for panel in OF_FORMATS if word in ("--help", "-h") else ():
                if following.lower() in panel.lower().split(" and "):
                    say(*page_of(self, ctx, panel))
                    raise typer.Exit
        return list(super().parse_args(ctx, args))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the page of the command."""
        formatter.write("\n".join(page(self, ctx)) + "\n")


class Group(TyperGroup):
    """Several commands; mistakes of the user in any of them are one line and exit code 2."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the page of the commands."""
        formatter.write("\n".join(page(self, ctx)) + "\n")

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that is meant; near names are proposed for one that there is not."""
        if args[0] not in self.commands and not args[0].startswith("-"):
            proposal = near(args[0], self.commands)
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
            code, message = error.exit_code, str(error)
        except _Mistake as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                say(*str(error.args[0]).splitlines())
                sys.exit(2)
            code, message = 2, str(mistake(error, given))
        else:
            sys.exit(code if isinstance(code, int) else 0)
        say(f"dsprep: error: {message}", err=True)
        sys.exit(code)


# --- mistakes --------------------------------------------------------------------------------


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
        return UsageError(f"{name}{'' if value is None else f' {value!r}'}: {words}", fix=look)
    if option is not None and "requires" in words:
        return UsageError(f"{option} needs a value", fix=look)
    return UsageError(words[:1].lower() + words[1:], fix=look)


def near(name: str, names: Iterable[str]) -> str | None:
    """Return a proposal of the names that are nearly `name`, or None."""
    names = list(names)
    found = [n for n in names if len(name) > 3 and n.startswith(name)]
    found += [n for n in get_close_matches(name, names, 2, 0.7) if n not in found]
    return f"did you mean {' or '.join(found[:2])}?" if found else None


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


# --- pages -----------------------------------------------------------------------------------


def page(command: Any, ctx: Any) -> list[str]:
    """Return the lines of the page that explains a command or a group of commands."""
    width = _width()
    arguments = [p for p in command.params if not p.opts[0].startswith("-")]
    options = [p for p in command.get_params(ctx) if p not in arguments and not p.hidden]
    commands = getattr(command, "commands", {})
    lines = [_usage(command, ctx), ""]
    for paragraph in textwrap.dedent(command.help or "").strip().split("\n\n"):
        lines += [*textwrap.wrap(paragraph, width), ""]
    remarks = (command.epilog or "").strip().split("\n\n")
    examples = [f"  {words}" for words in remarks if words.startswith("dsprep ")]
    if examples:
        lines += ["Examples:", *examples, ""]
    if commands:
        rows = [(f"  {n}", " ".join(c.help.split("\n\n")[0].split())) for n, c in commands.items()]
        lines += ["Commands:", *_table(rows, width), ""]
    rows = [(f"  {p.metavar}", p.help) for p in arguments if p.help]
    panels = dict.fromkeys(["Options", *map(_panel, options)])
    for panel in [p for p in panels if p not in OF_FORMATS]:
        rows += [(f"  {_names(p)}", _explained(p)) for p in options if _panel(p) == panel]
        lines += [f"{panel}:", *_table(rows, width), ""]
        rows = []
    rows = [
        (f"  {panel}", ", ".join(longest(p.opts) for p in options if _panel(p) == panel))
        for panel in OF_FORMATS
        if panel in panels
    ]
    if rows:
        heading = f"Options of one format ({ctx.command_path} --help FORMAT explains them):"
        lines += [*textwrap.wrap(heading, width), *_table(rows, width), ""]
    for words in remarks:
        if words and not words.startswith("dsprep "):
            lines += textwrap.wrap(words, width)
    return lines if lines[-1] else lines[:-1]


def page_of(command: Any, ctx: Any, panel: str) -> list[str]:
    """Return the lines that explain the options of a command for one format."""
    rows = [(f"  {_names(p)}", _explained(p)) for p in command.params if _panel(p) == panel]
    found = list(_table(rows, _width())) or ["  no options of its own"]
    return [_usage(command, ctx), "", f"Options for {panel}:", *found]


def _usage(command: Any, ctx: Any) -> str:
    arguments = [p for p in command.params if not p.opts[0].startswith("-")]
    shown = [p.metavar if p.required else f"[{p.metavar}]" for p in arguments]
    following = ["COMMAND ..."] if getattr(command, "commands", None) else []
    return " ".join(["Usage:", ctx.command_path, *shown, "[OPTIONS]", *following])


def _width() -> int:
    return max(50, min(WIDTH, shutil.get_terminal_size().columns))


def _panel(option: Any) -> str:
    return getattr(option, "rich_help_panel", None) or "Options"


def _names(option: Any) -> str:
    short = [n for n in option.opts if not n.startswith("--")]
    long = [n for n in option.opts if n.startswith("--")]
    text = ", ".join([*short, "/".join([*long, *option.secondary_opts])])
    return text if option.is_flag else f"{text} {option.metavar}"


def _explained(option: Any) -> str:
    default = option.default.value if isinstance(option.default, Enum) else option.default
    plain = option.show_default and not option.is_flag and default not in (None, "", [], ())
    return (option.help or "") + (f" [{default}]" if plain else "")


def _table(rows: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    for name, text in rows:
        parts = textwrap.wrap(" ".join(text.split()), width - LEFT, break_on_hyphens=False)
        if len(name) > LEFT - 2:
            yield name
        else:
            yield f"{name:<{LEFT}}{parts.pop(0) if parts else ''}".rstrip()
        for part in parts:
            yield f"{'':<{LEFT}}{part}"
