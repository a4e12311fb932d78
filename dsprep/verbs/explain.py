"""What a sidecar states, in words: offsets, laws, and what turns the stored bytes into values.

All of it follows from the sidecar and the sizes of the files; no sample is read. In large
datasets, samples spread evenly are taken, and estimates from them are marked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from dsprep.core.packing import Tables
from dsprep.core.schema import Field, Schema, show_dtype
from dsprep.errors import DsprepError
from dsprep.layout import as_json
from dsprep.layout.describe import sum_of
from dsprep.layout.laws import Affine, Law, Runs
from dsprep.layout.model import Column, FileLayout, Given, Grid, OwnFiles, Records
from dsprep.sidecar import spec
from dsprep.sidecar.entries import numbers
from dsprep.sidecar.proofs import summarize
from dsprep.sidecar.sidecar import Sidecar
from dsprep.writing.create_sidecar import Made


def explain(opened: Sidecar) -> dict[str, Any]:
    """Return what a sidecar states, as JSON.

    ``payload_nbytes`` are the bytes of the files that hold samples, None where no field can be
    located; ``exact`` says whether they were added up, not estimated. Files of one layout are one
    entry of ``layouts``, with the words for each field.

    Raises
    ------
    FormatError
        If it is damaged.
    """
    content, count = opened.content, len(opened)
    nbytes = sum(map(len, spec.encode(content, opened.companion() or b"")))
    data_nbytes = content.nbytes
    payload, exact = _payload(opened)
    return {
        "sidecar": str(opened.path),
        "nbytes": nbytes,
        "nbytes_per_sample": nbytes / count if count else None,
        "dataset": str(opened.dataset),
        "format": content.format,
        "files": len(content.files),
        "samples": count,
        "data_nbytes": data_nbytes,
        "payload_nbytes": payload,
        "payload_share": payload / data_nbytes if payload is not None and data_nbytes else None,
        "exact": exact,
        "layouts": list(_layouts(opened)),
        "lineage": dict(content.lineage),
        "notes": list(content.notes),
    }


def _layouts(opened: Sidecar) -> Iterator[dict[str, Any]]:
    which, counts = numbers(opened.content.files, "layout"), opened.content.counts
    for first in np.sort(np.unique(which, return_index=True)[1]).tolist():
        alike = which == which[first]
        layout, checksums = opened.layout(first), ""
        with suppress(DsprepError, OSError):  # the data are gone, or damaged
            checksums = summarize(opened.proofs.describe([first], opened.schema.names))
        blocks = None if layout.groups is None else layout.groups.blocks.offsets.words()
        yield {
            "files": int(alike.sum()),
            "samples": int(counts[alike].sum()),
            "fields": list(fields_of(layout, opened.schema)),
            "groups": layout.groups and f"{layout.groups.samples:,} samples, at {blocks}",
            "checksums": checksums,
            "made with": dict(layout.facts),
        }


def laws_of(made: Made) -> dict[str, str]:
    """Return the law of each field of a new sidecar; of the first layout, if there are several."""
    content = made.content
    if not content.files or not content.layouts:
        return {}
    first = next((f for f in content.files if f.samples), content.files[0])
    tables, json = Tables(made.companion or None, made.path), content.layouts[first.layout]
    layout = as_json.from_json(json, first.samples, content.schema, tables)
    several, laws = len(content.layouts), {}
    for words in fields_of(layout, content.schema):
        law = words.get("no offsets") or words.get("offsets") or words["stored"]
        laws[words["field"]] = f"has no offsets: {law}" if "no offsets" in words else law
        laws[words["field"]] += f" (in the first of {several:,} layouts)" * (several > 1)
    return laws


# --- words -----------------------------------------------------------------------------------


def fields_of(layout: FileLayout, schema: Schema) -> Iterator[dict[str, Any]]:
    """Yield how each field is stored, in words; ``decode`` is what is done to the stored bytes."""
    for field in schema:
        words: dict[str, Any] = {"field": field.name, "type": str(field)}
        match layout.find_field(field.name):
            case Records() as records:
                words |= _record_words(records, field)
            case Column(grid=Grid() as grid) as column:
                words |= _column_words(column, grid, field)
            case Column():
                words["stored"] = "nothing: it has no bytes"
            case OwnFiles() as own:
                words |= {"stored": "a file for each sample", "offsets": "0"}
                words |= {"lengths": _bytes(own.lengths), "decode": _typed(field)}
            case Given() as given:
                words["stored"] = f"in no file, but here: {given.value_numbers.words()}"
                if given.values is not None:
                    words["stored"] += f" of {len(given.values):,} values"
            case reason:
                words |= {"stored": "by the format's own library", "no offsets": reason}
        yield words


def _bytes(law: Law) -> str:
    return law.words() if isinstance(law, Runs) else law.words() + " bytes"


def _record_words(records: Records, field: Field) -> dict[str, Any]:
    part, frame, recipe = records.parts[field.name], records.frame, records.recipe
    stored = f"records of {records.blocks.path}" if records.blocks.path else "records"
    if records.order is not None:
        stored += f", of which sample i is number {records.order.words()}"
    steps = []
    if frame is not None:
        steps.append(f"proven by the frame {_called(frame)}")
    if part.at is not None:
        end = "the end" if part.nbytes is None else f"{part.at + part.nbytes:,}"
        steps.append(f"bytes {part.at:,} to {end} of the record")
    elif recipe is not None:
        steps.append(f"found in the record by the recipe {recipe.get('name')}")
    return {
        "stored": stored,
        "offsets": records.blocks.offsets.words(),
        "lengths": _bytes(records.blocks.lengths),
        "decode": "; ".join((*steps, _typed(field))),
    }


def _column_words(column: Column, grid: Grid, field: Field) -> dict[str, Any]:
    where = f" of {grid.blocks.path}" if grid.blocks.path else ""
    shape, chunk = (" x ".join(f"{n:,}" for n in sides) for sides in (grid.shape, grid.chunk))
    contiguous = grid.block_count == 1 and grid.plain
    stored = f"an array of {shape}"
    if not contiguous:
        stored += f", in {grid.block_count:,} chunk{'s' * (grid.block_count > 1)} of {chunk}"
    if column.first is not None and column.count is not None:
        stored += f"; rows from {column.first.words()} on, {column.count.words()} of them"
    elif column.lines != 1:
        stored += f"; {column.lines:,} rows each"
    steps = [f"undo {_called(f, 'id')}" for f in reversed(grid.filters)]
    if grid.masks is not None:
        steps.append(f"filters left out by the mask {grid.masks.words()}")
    if grid.fill is not None and any(grid.fill):
        steps.append("fill value where nothing is stored")
    base = grid.blocks.offsets
    offsets, lengths = base.words(), _bytes(grid.blocks.lengths)
    if contiguous and isinstance(base, Affine) and base.base >= 0:
        rows = column.first is not None
        nbytes = (1 if rows else column.lines) * grid.row_nbytes
        offsets = f"{base.base:,} + {'row' if rows else 'i'} * {nbytes:,}"
        lengths = f"{nbytes:,} bytes{' a row' * rows}"
    return {
        "stored": f"{stored}{where}",
        "offsets": offsets,
        "lengths": lengths,
        "decode": "; ".join((*steps, _typed(field))),
    }


def _called(json: Mapping[str, Any], key: str = "name") -> str:
    rest = {k: v for k, v in json.items() if k != key and isinstance(v, int | str | float)}
    inside = ", ".join(f"{k} {v}" for k, v in rest.items())
    return f"{json.get(key)} ({inside})" if inside else str(json.get(key))


def _typed(field: Field) -> str:
    if field.kind != "array":
        return "as stored" if field.kind == "bytes" else "UTF-8"
    order = "little-endian " if field.dtype.str[0] == "<" and field.dtype.itemsize > 1 else ""
    return f"read as {order}{show_dtype(field.dtype)}"


# --- figures ---------------------------------------------------------------------------------


def _payload(opened: Sidecar) -> tuple[int | None, bool]:
    """Return the bytes in the files that hold samples, and whether that is exact."""
    sums = [(*_payload_of(layout), files) for layout, files in opened.layouts()]
    located = [nbytes * files for nbytes, _, files in sums if nbytes is not None]
    return sum(located) if located else None, all(sure for _, sure, _ in sums)


def _payload_of(layout: FileLayout) -> tuple[int | None, bool]:
    sums: list[tuple[int, bool]] = []
    records = layout.records
    if records is not None:
        sizes = [p.nbytes for p in records.parts.values() if p.at is not None]
        if len(sizes) == len(records.parts) and None not in sizes:
            sums.append((layout.count * sum(n or 0 for n in sizes), True))
        else:
            sums.append(sum_of(records.blocks.lengths))
    sums += [sum_of(own.lengths) for own in layout.files.values()]
    for column in layout.columns.values():
        grid = column.grid
        if grid is None:
            sums.append((0, True))
        elif not grid.plain:
            sums.append(sum_of(grid.blocks.lengths))
        else:
            rows, sure = layout.count * column.lines, True
            if column.count is not None:
                rows, sure = sum_of(column.count)
            sums.append((rows * grid.row_nbytes, sure))
    return (sum(n for n, _ in sums) if sums else None), all(sure for _, sure in sums)
