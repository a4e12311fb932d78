"""Printing where samples lie, as a table or as JSON, however many they are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING

from dsprep.cli.report import say, say_json
from dsprep.core.escaping import printable

if TYPE_CHECKING:
    from dsprep.sidecar.sidecar import Row

_AT_ONCE = 1 << 14


def print_places_json(rows: Iterator[Row]) -> None:
    """Print places as a JSON list, one in a line, as they come."""
    from json import dumps

    text = lru_cache(_AT_ONCE)(dumps)
    some = list(islice(rows, _AT_ONCE))
    say_json("[" if some else "[]")
    while some:
        following = list(islice(rows, _AT_ONCE))
        lines = [
            f' {{"index": {i}, "field": {text(field)}, "file": {text(file)}, '
            f'"offset": {offset}, "length": {length}'
            + (
                "}"
                if inside is None
                else f', "inside": {inside}, "inside_nbytes": {inside_nbytes}}}'
            )
            for i, field, file, offset, length, inside, inside_nbytes in some
        ]
        say_json(",\n".join(lines) + ("," if following else "\n]"))
        some = following


def print_places(rows: Iterator[Row]) -> None:
    """Print places as a table; the widths are those of its beginning."""
    heads = ("index", "field", "file", "offset", "length", "inside", "bytes inside")
    template, columns = "", 0
    text = lru_cache(_AT_ONCE)(printable)
    safe = ((i, text(field), text(file), *rest) for i, field, file, *rest in rows)
    while some := list(islice(safe, _AT_ONCE)):
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
        say(*lines)
