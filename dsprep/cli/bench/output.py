"""Printing a report: tables and the answer on the terminal, and the requested files."""

from __future__ import annotations

import os
import secrets
import stat
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsprep.cli.report import print_json, remark, say
from dsprep.core.escaping import printable, printable_json
from dsprep.errors import TargetError, UsageError

if TYPE_CHECKING:
    from dsprep.bench.report.model import BenchReport, Row

WIDTH = 100
"""Columns of characters where the output is not a terminal."""
STYLES: dict[str, dict[str, Any]] = {
    "": {},
    "bold": {"bold": True},
    "dim": {"dim": True},
    "red": {"fg": "red"},
}
"""Styles of kinds of lines on a terminal."""
GAP = 2
HEAD = 4096
"""Bytes of a file by which it is known."""

STDOUT = Path("-")


def emit(report: BenchReport, *, json: Path | None, html: Path | None) -> None:
    """Print the tables and the answer of a report, and write the requested files.

    With ``-`` for `json` nothing but the JSON is printed.
    """
    from dsprep.bench.report.page import html as page
    from dsprep.sidecar.spec import dump_json

    check_targets(json=json, html=html)
    if json == STDOUT:
        print_json(report.to_json())
    else:
        show(report)
    contents: list[tuple[Path | None, Callable[[], str]]] = [
        (None if json == STDOUT else json, lambda: printable_json(dump_json(report.to_json()))),
        (html, lambda: page(report)),
    ]
    for path, content in contents:
        if path is not None:
            write(path, content())


# --- on the terminal -------------------------------------------------------------------------


def show(report: BenchReport) -> None:
    """Print the tables, the remarks and the answer."""
    from dsprep.bench.report.tables import footnotes, tables

    room = width()

    def line(text: str, style: str = "") -> None:
        say(text.rstrip(), style=STYLES[style])

    for heading, rows in tables(report).items():
        if heading:
            line(heading, "bold")
        for text, style in drawn(report, rows, room):
            line(text, style)
        line("")
    for words in footnotes(report.rows):
        for part in textwrap.wrap(f"* {words}", room, subsequent_indent="  "):
            line(part, "dim")
    for i, paragraph in enumerate(report.answer):
        if i or any(r.notes for r in report.rows):
            line("")
        for part in textwrap.wrap(paragraph, min(room, WIDTH), break_on_hyphens=False):
            line(part)


def width() -> int:
    """Return the characters of a line: the terminal's, or `WIDTH` where there is none."""
    if not sys.stdout.isatty():
        return WIDTH
    try:
        return max(40, os.get_terminal_size(sys.stdout.fileno()).columns)
    except OSError:
        return WIDTH


def drawn(report: BenchReport, rows: Sequence[Row], room: int) -> list[tuple[str, str]]:
    """Return the lines of a table that fits in `room` characters, each with its style.

    Labels stay whole; columns of little importance go first. Numbers are to the right; a row
    without numbers says why across the columns.
    """
    from dsprep.bench.report.model import MEASURES
    from dsprep.bench.report.tables import columns, label, show

    names, first = [printable(label(report, row)) for row in rows], report.swept or "strategy"
    left = max(map(len, (first, *names)))
    cells, sizes, kept = {}, {}, list(columns(report))
    for name in kept:
        kind = MEASURES[name]
        cells[name] = [
            "" if row.failure else show(name, row.measures.get(name), spread=kind.spread)
            for row in rows
        ]
        sizes[name] = GAP + max(map(len, (kind.heading, *cells[name])))
    while kept and left + sum(sizes[name] for name in kept) > room:
        kept.remove(max(kept, key=lambda name: (MEASURES[name].rank, name)))
    head = "".join(f"{MEASURES[name].heading:>{sizes[name]}}" for name in kept)
    across = left + sum(sizes[name] for name in kept)
    lines = [(f"{first:<{left}}{head}", "bold"), ("-" * across, "dim")]
    for i, (name, row) in enumerate(zip(names, rows, strict=True)):
        if row.failure:
            parts = textwrap.wrap(printable(row.failure), max(20, room - left - GAP)) or [""]
            both = zip([name, *[""] * (len(parts) - 1)], parts, strict=True)
            lines += [(f"{n:<{left}}{' ' * GAP}{part}", "red") for n, part in both]
        else:
            numbers = "".join(f"{cells[n][i]:>{sizes[n]}}" for n in kept)
            lines.append((f"{name:<{left}}{numbers}", "bold" if name.endswith("knee") else ""))
    return lines


# --- files -----------------------------------------------------------------------------------


def check_targets(*, json: Path | None = None, html: Path | None = None) -> None:
    """Make sure that files may be written, best before anything is measured."""
    requested = {"--json": json, "--html": html}
    taken: dict[Path, str] = {}
    for option, path in requested.items():
        if path is None or (option == "--json" and path == STDOUT):
            continue
        check_target(option, path)
        real = path.resolve()
        if real in taken:
            raise UsageError(f"{taken[real]} and {option} name the same file", where=path)
        taken[real] = option
        if path.is_file() and not _is_ours(path, option):  # else a pipe, a device, or nothing yet
            raise UsageError(
                f"{option} would replace a file that dsprep bench did not write",
                where=path,
                fix="choose another name",
            )


def check_target(option: str, path: Path) -> None:
    """Make sure that the value of an option is the path of a file."""
    if path == STDOUT:
        raise UsageError(f"{option} needs a file", expected="- with --json only", found="-")
    if not path.parent.is_dir():
        raise UsageError("there is no such directory", where=path.parent)
    if path.is_dir():
        raise UsageError("this is a directory", where=path, fix=f"name a file with {option}")


def check_new(path: Path | None, overwrite: bool, option: str) -> None:
    """Make sure that the file that an option names may be written, if it is asked for."""
    if path is not None:
        check_target(option, path)
        if path.is_file() and not overwrite:
            raise TargetError("it exists already", where=path, fix="add --overwrite to replace it")


def _is_ours(path: Path, option: str) -> bool:
    """Return whether a file is empty, or is what `dsprep bench` writes for an option."""
    from dsprep.bench.report.page import MARK

    with path.open("rb") as file:
        head = file.read(HEAD)
    if option == "--html":
        return not head or MARK.encode() in head
    return not head or (head.lstrip().startswith(b"{") and b'"dsprep_bench' in head)


def write(path: Path, content: str) -> None:
    """Write a file as a whole or not at all, and say so; a pipe or device is written to."""
    data = content.encode("utf-8", "backslashreplace")
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        with path.open("wb") as file:
            file.write(data)
    else:
        target = path.resolve()
        temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}")
        try:
            with temporary.open("xb") as file:
                file.write(data)
                if target.exists():
                    os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    remark(f"wrote {path}")
