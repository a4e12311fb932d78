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
    widths: list[int] = []
    while some := list(islice(rows, _AT_ONCE)):
        cells = [["" if v is None else str(v) for v in row] for row in some]
        lines = cells
        if not widths:
            lines = [list(heads if any(row[5] for row in cells) else heads[:5]), *cells]
            widths = [max(map(len, column)) for column in zip(*lines, strict=False)]
        typer.echo(
            "\n".join(
                "  ".join(
                    f"{cell:<{width}}" if k in (1, 2) else f"{cell:>{width}}"
                    for k, (cell, width) in enumerate(zip(line, widths, strict=False))
                ).rstrip()
                for line in lines
            )
        )
