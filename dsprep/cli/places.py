"""Printing where samples lie, as a table or as JSON, however many they are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from dsprep.located import Row

_AT_ONCE = 1 << 14


def print_places_json(rows: Iterator[Row]) -> None:
    """Print places as a JSON list, one in a line, as they come."""
    from json import dumps

    shown: dict[str, str] = {}

    def text(word: str) -> str:
        if word not in shown:
            if len(shown) > _AT_ONCE:
                shown.clear()
            shown[word] = dumps(word)
        return shown[word]

    before = "[\n "
    while some := list(islice(rows, _AT_ONCE)):
        lines = [
            f'{{"index": {i}, "field": {text(field)}, "file": {text(file)}, '
            f'"offset": {offset}, "length": {length}'
            + (
                "}"
                if inside is None
                else f', "inside": {inside}, "inside_nbytes": {inside_nbytes}}}'
            )
            for i, field, file, offset, length, inside, inside_nbytes in some
        ]
        typer.echo(before + ",\n ".join(lines), nl=False)
        before = ",\n "
    typer.echo("[]" if before == "[\n " else "\n]")


def print_places(rows: Iterator[Row]) -> None:
    """Print places as a table; the widths are those of its beginning."""
    heads = ("index", "field", "file", "offset", "length", "inside", "bytes inside")
    template, columns = "", 0
    while some := list(islice(rows, _AT_ONCE)):
        lines = []
        if not template:
            columns = 7 if any(row[5] is not None for row in some) else 5
            widths = [
                max(len(head), *(len(str(row[k])) for row in some))
                for k, head in enumerate(heads[:columns])
            ]
            left = ("", "-", "-", "", "", "", "")
            template = "  ".join(
                f"%{sign}{width}s" for sign, width in zip(left, widths, strict=False)
            )
            lines.append(template % heads[:columns])
        if columns == 5:
            lines += [template % row[:5] for row in some]
        else:
            cells = (tuple("" if v is None else v for v in row) for row in some)
            lines += [(template % row).rstrip() for row in cells]
        typer.echo("\n".join(lines))
