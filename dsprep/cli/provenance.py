"""``dsprep provenance``."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dsprep.cli.command import command
from dsprep.cli.report import (
    count_bar,
    fail,
    note,
    print_done,
    print_json,
    print_rows,
    remark,
    say,
    say_json,
)
from dsprep.core.escaping import printable
from dsprep.formats.options import OpenOptions

if TYPE_CHECKING:
    from dsprep.errors import DsprepError
    from dsprep.sidecar.sidecar import Extent, Sidecar
    from dsprep.writing.create_sidecar import NewSidecar

_AT_ONCE = 1 << 14  # extents that are printed together


@command
def provenance(
    paths: tuple[str, ...],
    /,
    reading: OpenOptions,
    out: Path | None = None,
    checksums: bool = False,
    dry_run: bool = False,
    workers: int | None = None,
    memory: str | None = None,
    executor: Executor | None = None,
    show: bool = False,
    locate: str | None = None,
    check: bool = False,
    full: bool = False,
    export: str | None = None,
    json: bool = False,
) -> None:
    """Write a small sidecar from which the location of every sample is computed, or use it.

    --show, --locate, --check and --export use it; without one, all but --check make it in memory.

    Parameters
    ----------
    paths : DATA...
        Files, directories, quoted globs or @list.txt, read as one dataset.
    out
        Where the sidecar is, if not beside the dataset; with --export: the file to write.
    checksums
        Read all data and keep CRC-32Cs of it.
    dry_run
        Make the sidecar without writing it.
    workers
        Threads, one per core and at most 8 by default; or processes of --executor. Thousands of
        files are examined by processes.
    memory : SIZE
        Memory for what is read and decoded; a quarter of what is free by default.
    executor : KIND
        threads, processes, mpi or dask, as of dsprep convert.
    show
        Explain it in words.
    locate : SAMPLES
        Print the extents of samples, such as 5,100:200 or -1; those of --field, or of all.
    check
        Find all problems of the sidecar and its data.
    full
        With --check: compare every offset with those that the format's own library finds, and every
        checksum.
    export : KIND
        Write kerchunk references, or a dali-idx index.
    json
        Print the result as JSON.

    Examples
    --------
    dsprep provenance train.lmdb
    dsprep provenance 'shards/*.tfrecord' --checksums
    dsprep provenance train.h5 --show
    dsprep provenance train.h5 --locate 5,100:200 --field x --json
    dsprep provenance train.lmdb --check --full

    Notes
    -----
    Exit status: 0 fine, 1 a problem, 2 wrong usage.
    """
    uses = {"--show": show, "--locate": locate, "--check": check, "--export": export}
    chosen = [name for name, value in uses.items() if value not in (None, False)]
    if len(chosen) > 1:
        fail(f"{' and '.join(chosen)} do not go together", 2)
    if chosen and (checksums or dry_run):
        fail(f"--checksums and --dry-run are for writing a sidecar, not for {chosen[0]}", 2)
    if export is not None:
        _check_kind(export, reading)
    if full and not check:
        fail("--full goes with --check", 2)
    if check:
        _check(paths, out, full, json)
        return
    if not chosen:
        from dsprep import executors
        from dsprep.verbs.provenance import provenance as make

        with (
            count_bar("provenance", not json) as update,
            executors.opened("threads" if executor else "processes", workers=workers) as processes,
        ):
            made = make(
                paths,
                reading,
                out=out,
                checksums=checksums,
                write=not dry_run,
                progress=update,
                executor=executor,
                processes=processes,
                workers=workers,
            )
        _report_made(made, dry_run, json)
        return
    with _existing(paths, reading, None if export is not None else out, json) as opened:
        names = _fields(opened, reading)
        if show:
            _show(opened, json)
        elif locate is not None:
            _locate(opened, locate, names, json)
        elif export is not None:
            _export(opened, export, out, json)


def _check_kind(kind: str, reading: OpenOptions) -> None:
    """Leave the command if there is no such export, or fields are chosen for it."""
    from dsprep.sidecar.export import KINDS

    if reading.fields:
        fail("--field does not go with --export: all fields are exported", 2)
    if kind not in KINDS:
        fail(f"there is no export {kind} (expected one of {', '.join(KINDS)})", 2)


# --- writing ---------------------------------------------------------------------------------


def _report_made(made: NewSidecar, dry_run: bool, json: bool) -> None:
    from dsprep.verbs.explain import laws_of

    laws = laws_of(made)
    if json:
        print_json(
            {
                "path": str(made.path),
                "nbytes": made.nbytes,
                "written": not dry_run,
                "format": made.content.format,
                "files": len(made.content.files),
                "samples": made.content.samples,
                "fields": laws,
                "notes": list(made.content.notes),
            }
        )
        return
    rows = [
        ("sidecar", str(made.path)),
        ("bytes", f"{made.nbytes:,}"),
        ("samples", f"{made.content.samples:,} in {_files(len(made.content.files))}"),
        *((f"field {name}", law) for name, law in laws.items()),
    ]
    (print_rows if dry_run else print_done)(rows)
    for line in made.content.notes:
        note(line)
    if dry_run:
        say("Nothing was written.")


def _files(count: int) -> str:
    return f"{count:,} file{'' if count == 1 else 's'}"


# --- using -----------------------------------------------------------------------------------


def _existing(paths: Sequence[str], reading: OpenOptions, out: Path | None, json: bool) -> Sidecar:
    """Return the sidecar that is there, or is made for this."""
    from dsprep.verbs.find import find_or_make

    with count_bar("provenance", not json) as update:
        opened, kept = find_or_make(paths, reading, out, update)
    if not kept:
        remark(f"there is no sidecar; dsprep provenance {shlex.join(paths)} keeps one")
    return opened


def _fields(opened: Sidecar, reading: OpenOptions) -> list[str]:
    """Return the fields that ``--field`` names, each of which the sidecar has."""
    return [opened.schema[spec.name].name for spec in reading.fields]


def _show(opened: Sidecar, json: bool) -> None:
    from dsprep.verbs.explain import explain

    (print_json if json else _print_explained)(explain(opened))


def _print_explained(facts: dict[str, Any]) -> None:
    from dsprep.core.units import show_nbytes

    rows = [
        ("sidecar", facts["sidecar"]),
        ("bytes", f"{facts['nbytes']:,}"),
        ("dataset", f"{facts['dataset']}, {facts['format']}, {_files(facts['files'])}"),
        ("samples", f"{facts['samples']:,}"),
        ("data", show_nbytes(facts["data_nbytes"])),
    ]
    names = {"source": "made from", "command": "by", "version": "with dsprep", "created": "on"}
    made = {words: facts["lineage"].get(key) for key, words in names.items()}
    rows += [
        (words, ", ".join(value) if isinstance(value, list) else str(value))
        for words, value in made.items()
        if value
    ]
    print_rows(rows)
    for layout in facts["layouts"]:
        if len(facts["layouts"]) > 1:
            say("", f"{layout['samples']:,} samples in {_files(layout['files'])} of one layout:")
        for field in layout["fields"]:
            say("", field["type"])
            print_rows([(f"  {k}", v) for k, v in field.items() if k not in ("field", "type")])
            if "no offsets" in field:
                say(f"  remedy: dsprep convert {facts['dataset']} DST")
        lines = [f"{name}: {layout[name]}" for name in ("groups", "checksums") if layout[name]]
        if made_with := ", ".join(f"{k} {v}" for k, v in layout["made with"].items()):
            lines.append(f"made with {made_with}")
        if lines:
            say("", *lines)
    for line in facts["notes"]:
        note(line)


def _locate(opened: Sidecar, text: str, names: list[str], json: bool) -> None:
    from dsprep.verbs.find import parse_samples, unlocated

    chosen = parse_samples(text, len(opened))
    if not names:
        lost = unlocated(opened)
        names = [n for n in opened.schema.names if n not in lost]
        for name, reason in lost.items():
            note(f"field {name} cannot be located: {reason}")
        if not names:
            return print_json([]) if json else None
    rows = chain.from_iterable(opened.rows(part, names) for part in chosen)
    if json:
        _print_extents_json(rows)
    else:
        _print_extents(rows)
    return None


def _print_extents_json(rows: Iterator[Extent]) -> None:
    """Print extents as a JSON list, one per line, as they come."""
    from json import dumps

    some = list(islice(rows, _AT_ONCE))
    say_json("[" if some else "[]")
    while some:
        following = list(islice(rows, _AT_ONCE))
        lines = ",\n ".join(dumps(row.to_json()) for row in some)
        say_json(f" {lines}" + ("," if following else "\n]"))
        some = following


def _print_extents(rows: Iterator[Extent]) -> None:
    """Print extents as a table; the widths are those of its beginning."""
    heads: Sequence[str] = ("index", "field", "file", "offset", "length", "inside", "bytes inside")
    widths = list[int]()
    while some := list(islice(rows, _AT_ONCE)):
        table = [["" if v is None else printable(str(v)) for v in row] for row in some]
        if not widths:
            heads = heads[: 7 if any(row.inside is not None for row in some) else 5]
            table = [[*heads], *table]
            widths = [max(map(len, cells)) for cells in zip(*table, strict=False)]
        columns = [*zip("><<>>>>", widths, strict=False)][: len(heads)]
        for row in table:
            cells = (f"{cell:{s}{n}}" for cell, (s, n) in zip(row, columns, strict=False))
            say("  ".join(cells).rstrip())


def _export(opened: Sidecar, kind: str, out: Path | None, json: bool) -> None:
    from dsprep.sidecar import export

    notes: list[str] = []
    written = export.export(opened, kind, out, notes=notes)
    if json:
        print_json({"export": kind, "files": [str(p) for p in written], "notes": notes})
        return
    for path in written:
        say(str(path))
    for line in notes:
        note(line)


# --- checking --------------------------------------------------------------------------------


def _check(paths: Sequence[str], at: Path | None, full: bool, json: bool) -> None:
    from dsprep.verbs.check import check as look

    with count_bar("check", not json) as update:
        problems = look(paths, full=full, at=at, progress=update)
    if json:
        kept = ("what", "where", "expected", "found")
        facts = [{k: v for k in kept if (v := getattr(p, k)) is not None} for p in problems]
        content = [{k: v if isinstance(v, int) else str(v) for k, v in f.items()} for f in facts]
        print_json({"valid": not problems, "full": full, "problems": content})
    else:
        _print_problems(problems, paths, full)
    if problems:
        raise typer.Exit(1)


def _print_problems(problems: list[DsprepError], paths: Sequence[str], full: bool) -> None:
    for problem in problems:
        say(f"problem: {problem}")
    if problems:
        count = f"{len(problems):,} problem{'' if len(problems) == 1 else 's'}"
        say(
            f"{count}; if the data are intact, write the sidecar again with "
            f"dsprep provenance {shlex.join(paths)}"
        )
    elif full:
        say("valid: all extents and checksums agree with the format's own library")
    else:
        say("valid: nothing has changed, and all extents are in their files (--check --full reads)")
