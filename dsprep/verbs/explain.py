"""What a sidecar states, in words and figures: offsets, laws, and what reading will cost.

All of it follows from the sidecar and the sizes of the files; no sample is read. In large
datasets, samples spread evenly are taken, and estimates from them are marked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dsprep.core.packing import Tables
from dsprep.core.schema import Field, Ints, Schema, show_dtype
from dsprep.errors import DsprepError
from dsprep.formats import FRAMES, RECIPES
from dsprep.layout import as_json
from dsprep.layout.describe import sum_of
from dsprep.layout.laws import Affine, Law, Runs
from dsprep.layout.locate import locate, rows_of
from dsprep.layout.model import Column, FileLayout, Given, OwnFiles, Records
from dsprep.sidecar import spec
from dsprep.sidecar.proofs import summarize
from dsprep.sidecar.sidecar import Sidecar
from dsprep.writing.create_sidecar import Made

NEAR = 64 << 10
"""Bytes between two reads that do not make them two: skipping them takes no longer."""
IN_A_ROW = 1000
"""Consecutive samples whose reads are counted together."""

_WINDOWS = 64
_SLICE = 1 << 20
_APART = 1 << 41  # between ranges of different files


@dataclass(frozen=True)
class FieldWords:
    """How a field of a file is stored.

    `offsets` and `lengths` are the laws in words, empty without any; `decode` is what turns the
    stored bytes into values, step by step; `unlocated`: why only the format's library can read it.
    """

    field: str
    type: str
    stored: str
    offsets: str = ""
    lengths: str = ""
    decode: tuple[str, ...] = ()
    unlocated: str | None = None


@dataclass(frozen=True)
class LayoutWords:
    """What files of one layout have in common.

    `checksums`: what each field can be compared with, empty if only the data would show it;
    `facts` and `history`: how the files were made as far as known, as JSON and as a sentence.
    """

    files: int
    samples: int
    fields: tuple[FieldWords, ...]
    groups: str
    checksums: str
    facts: Mapping[str, Any]
    history: str


@dataclass(frozen=True)
class Explanation:
    """What a sidecar states.

    Attributes
    ----------
    nbytes, data_nbytes
        Bytes of the sidecar and its companion, and of all files.
    payload_nbytes, exact
        Bytes of the files that hold samples, and whether these were added up, not estimated; None
        where no field can be located.
    runs, run_samples
        Contiguous ranges that a read of `run_samples` consecutive samples takes on average, where
        ranges less than 64 KiB apart count as one. None if no field can be located.
    """

    path: str
    dataset: str
    format: str
    files: int
    samples: int
    nbytes: int
    data_nbytes: int
    payload_nbytes: int | None
    exact: bool
    runs: float | None
    run_samples: int
    layouts: tuple[LayoutWords, ...]
    lineage: Mapping[str, Any]
    notes: tuple[str, ...]

    @property
    def payload_share(self) -> float | None:
        """Share of the files' bytes that hold samples."""
        if self.payload_nbytes is None or not self.data_nbytes:
            return None
        return self.payload_nbytes / self.data_nbytes

    @property
    def nbytes_per_sample(self) -> float | None:
        """Bytes of the sidecar for each sample."""
        return self.nbytes / self.samples if self.samples else None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        derived = {
            "payload_share": self.payload_share,
            "nbytes_per_sample": self.nbytes_per_sample,
        }
        return {**asdict(self), **derived}


def explain(opened: Sidecar) -> Explanation:
    """Return what a sidecar states.

    Raises
    ------
    FormatError
        If it is damaged.
    """
    content = opened.content
    payload, exact = _payload(opened)
    return Explanation(
        str(opened.path),
        str(opened.dataset),
        content.format,
        len(content.files),
        len(opened),
        len(spec.dump(content).encode()) + int((content.companion or {}).get("nbytes", 0)),
        sum(f.identity.nbytes for f in content.files),
        payload,
        exact,
        _runs(opened),
        min(IN_A_ROW, len(opened)),
        tuple(_layouts(opened)),
        content.lineage,
        content.notes,
    )


def _layouts(opened: Sidecar) -> Iterator[LayoutWords]:
    files: dict[int, list[int]] = {}
    for i, entry in enumerate(opened.content.files):
        files.setdefault(entry.layout, []).append(i)
    for numbers in files.values():
        layout = opened.layout(numbers[0])
        groups = layout.groups
        yield LayoutWords(
            len(numbers),
            sum(opened.content.files[i].samples for i in numbers),
            tuple(fields_of(layout, opened.schema)),
            ""
            if groups is None
            else f"{groups.samples:,} samples, at {groups.blocks.offsets.words()}",
            _checksums(opened, numbers[0]),
            layout.facts,
            history(layout.facts),
        )


def _checksums(opened: Sidecar, number: int) -> str:
    try:
        return summarize(opened.proofs.describe([number], opened.schema.names))
    except (DsprepError, OSError):  # the data are gone, or damaged
        return ""


def laws_of(made: Made) -> dict[str, str]:
    """Return the law of each field of a new sidecar; of the first layout, if there are several."""
    tables = Tables(made.companion or None, made.path)
    content = made.content
    laws: dict[str, str] = {}
    if not content.files or not content.layouts:
        return laws
    first = next((f for f in content.files if f.samples), content.files[0])
    json = content.layouts[first.layout]
    layout = as_json.from_json(json, first.samples, content.schema, tables)
    for words in fields_of(layout, content.schema):
        if words.unlocated is not None:
            laws[words.field] = f"has no offsets: {words.unlocated}"
        else:
            laws[words.field] = words.offsets or words.stored
    if len(content.layouts) > 1:
        more = f" (in the first of {len(content.layouts):,} layouts)"
        laws = {name: law + more for name, law in laws.items()}
    return laws


# --- words -----------------------------------------------------------------------------------


def fields_of(layout: FileLayout, schema: Schema) -> Iterator[FieldWords]:
    """Yield how each field is stored, in words."""
    for field in schema:
        name, type_ = field.name, str(field)
        match layout.find_field(name):
            case Records() as records:
                yield _record_words(records, field)
            case Column() as column:
                yield _column_words(column, field)
            case OwnFiles() as own:
                stored, begin = "a file for each sample", Affine(layout.count, 0).words()
                lengths, steps = _bytes(own.lengths), tuple(_typed(field))
                yield FieldWords(name, type_, stored, begin, lengths, steps)
            case Given() as given:
                yield _given_words(given, field)
            case reason:
                yield FieldWords(name, type_, "by the format's own library", unlocated=reason)


def _bytes(law: Law) -> str:
    return law.words() if isinstance(law, Runs) else law.words() + " bytes"


def _record_words(records: Records, field: Field) -> FieldWords:
    part, frame, recipe = records.parts[field.name], records.frame, records.recipe
    where = f" of {records.blocks.path}" if records.blocks.path else ""
    stored = f"records{where}"
    if records.order is not None:
        stored += f", of which sample i is number {records.order.words()}"
    steps = []
    if frame is not None:
        known = FRAMES.get(str(frame.get("name")))
        steps.append(_called(frame) if known is None else known.words)
    if part.at is not None:
        end = "the end" if part.nbytes is None else f"{part.at + part.nbytes:,}"
        steps.append(f"bytes {part.at:,} to {end} of the record")
    elif recipe is not None:
        taken = RECIPES.get(str(recipe.get("name")))
        steps.append(f"found in the record by {'a recipe' if taken is None else taken.words}")
    steps += _typed(field)
    return FieldWords(
        field.name,
        str(field),
        stored,
        records.blocks.offsets.words(),
        _bytes(records.blocks.lengths),
        tuple(steps),
    )


def _given_words(given: Given, field: Field) -> FieldWords:
    stored = f"in no file, but here: {given.value_numbers.words()}"
    if given.values is not None:
        stored = f"in no file, but here: {len(given.values):,} values, of which sample i has number"
        stored += f" {given.value_numbers.words()}"
    return FieldWords(field.name, str(field), stored)


def _column_words(column: Column, field: Field) -> FieldWords:
    grid = column.grid
    if grid is None:
        return FieldWords(field.name, str(field), "nothing: it has no bytes")
    where = f" of {grid.blocks.path}" if grid.blocks.path else ""
    shape = " x ".join(f"{n:,}" for n in grid.shape)
    if grid.block_count == 1 and grid.plain:
        stored = f"a contiguous array of {shape}{where}"
    else:
        chunk = " x ".join(f"{n:,}" for n in grid.chunk)
        chunks = "a chunk" if grid.block_count == 1 else f"{grid.block_count:,} chunks"
        stored = f"an array of {shape}, in {chunks} of {chunk}{where}"
    if grid.file_numbers is not None:
        stored += f", the file: {grid.file_numbers.words()}"
    if grid.files is not None:
        stored += f", {int(np.prod(grid.files)):,} in each file"
    if column.first is not None and column.count is not None:
        stored += f"; rows from {column.first.words()} on, {column.count.words()} of them"
    elif column.lines != 1:
        stored += f"; {column.lines:,} rows each"
    steps = [f"undo {_called(f, 'id')}" for f in reversed(grid.filters)]
    if grid.masks is not None:
        steps.append(f"filters left out by the mask {grid.masks.words()}")
    if grid.fill is not None and any(grid.fill):
        steps.append("fill value where nothing is stored")
    steps += _typed(field)
    offsets, lengths = grid.blocks.offsets.words(), _bytes(grid.blocks.lengths)
    base = grid.blocks.offsets
    if grid.block_count == 1 and grid.plain and isinstance(base, Affine) and base.base >= 0:
        nbytes = (1 if column.first is not None else column.lines) * grid.row_nbytes
        offsets, lengths = f"{base.base:,} + i * {nbytes:,}", f"{nbytes:,} bytes"
        if column.first is not None:
            row, lengths = column.first.words(), f"{nbytes:,} bytes a row"
            plain = (base.base, nbytes) == (0, 1)  # rows are the bytes of the file
            offsets = row if plain else f"{base.base:,} + row * {nbytes:,}, rows from {row} on"
    return FieldWords(field.name, str(field), stored, offsets, lengths, tuple(steps))


def _called(json: Mapping[str, Any], key: str = "name") -> str:
    rest = {k: v for k, v in json.items() if k != key and isinstance(v, int | str | float)}
    inside = ", ".join(f"{k} {v}" for k, v in rest.items())
    return f"{json.get(key)} ({inside})" if inside else str(json.get(key))


def _typed(field: Field) -> list[str]:
    if field.kind != "array":
        return ["as stored" if field.kind == "bytes" else "UTF-8"]
    order = "little-endian " if field.dtype.str[0] == "<" and field.dtype.itemsize > 1 else ""
    return [f"read as {order}{show_dtype(field.dtype)}"]


def history(facts: Mapping[str, Any]) -> str:
    """Return how a file was made as a sentence; empty if nothing is known."""
    if not facts:
        return ""
    clauses = []
    known = dict(facts)

    def say(key: str, text: str) -> None:
        if key in known:
            value = known.pop(key)
            clauses.append(text.format(f"{value:,}" if isinstance(value, int) else value))

    say("order", "with {}")
    interval, several = known.pop("commit interval", None), known.pop("commit interval range", None)
    if isinstance(interval, int):
        clauses.append(f"{interval:,} records per transaction")
        if isinstance(several, list) and len(several) == 2:
            clauses[-1] += (
                f" (any number from {several[0]:,} to {several[1]:,} gives the same file)"
            )
    elif interval is not None:
        clauses.append(f"in {interval}")
    if (append := known.pop("append", None)) is not None:
        clauses.append("with MDB_APPEND" if append else "without MDB_APPEND")
    if (compact := known.pop("copied compactly", None)) is not None and compact:
        clauses.append("and copied compactly")
    if (database := known.pop("database", None)) is not None:
        clauses.append(f"in the {database} database")
    say("record size", "values of {} bytes")
    if (where := known.pop("values", None)) is not None and clauses:
        clauses[-1] += f" {where}"
    say("key size", "keys of {} bytes")
    say("leaf capacity", "{} records per leaf")
    say("branch capacity", "{} children per branch")
    say("page size", "pages of {} bytes")
    say("meta pages", "{} meta pages")
    clauses += [f"{key} {value}" for key, value in known.items()]
    return f"Records were put {', '.join(clauses)}."


# --- figures ---------------------------------------------------------------------------------


def _payload(opened: Sidecar) -> tuple[int | None, bool]:
    """Return the bytes in the files that hold samples, and whether that is exact."""
    known: dict[tuple[int, int], tuple[int | None, bool]] = {}
    payload: int | None = None
    exact = True
    for i, entry in enumerate(opened.content.files):
        key = entry.layout, entry.samples
        if key not in known:
            known[key] = _payload_of(opened.layout(i))
        nbytes, sure = known[key]
        if nbytes is not None:
            payload = (payload or 0) + nbytes
        exact &= sure
    return payload, exact


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
        elif column.count is not None:
            rows, sure = sum_of(column.count)
            sums.append((rows * grid.row_nbytes, sure))
        else:
            sums.append((layout.count * column.lines * grid.row_nbytes, True))
    if not sums:
        return None, True
    return sum(n for n, _ in sums), all(sure for _, sure in sums)


def _runs(opened: Sidecar) -> float | None:
    """Return the mean number of ranges that consecutive samples take."""
    n = len(opened)
    step = min(IN_A_ROW, n)
    if not n:
        return None
    steps = n // step
    begins = np.unique(np.linspace(0, steps - 1, min(steps, _WINDOWS)).astype(np.int64)) * step
    counted = [_ranges(opened, int(a), int(a) + step) for a in begins]
    known = [k for k in counted if k is not None]
    return float(np.mean(known)) if known else None


def _ranges(opened: Sidecar, start: int, stop: int) -> int | None:
    """Return how many ranges a read of some samples takes, one field after another."""
    count, any_field = 0, False
    for layout, _, local in opened.files_of(start, stop):
        for name in _streams(layout):
            any_field = True
            if name in layout.files:
                count += len(local)
                continue
            ranges = _stored(layout, name, local)
            if ranges is None:
                continue
            offset, length = ranges
            if len(offset):
                once = np.sort(np.unique(offset, return_index=True)[1])  # a chunk is read once
                offset, length = offset[once], length[once]
                ends = offset + length
                far = (offset[1:] - ends[:-1] > NEAR) | (offset[:-1] - ends[1:] > NEAR)
                count += 1 + int(far.sum())
    return count if any_field else None


def _streams(layout: FileLayout) -> Iterator[str]:
    """Yield the fields that are read one by one: those of records come together."""
    if layout.records is not None and layout.records.parts:
        yield next(iter(layout.records.parts))
    yield from layout.files
    yield from (n for n, c in layout.columns.items() if c.grid is not None)


def _stored(layout: FileLayout, name: str, local: Ints) -> tuple[Ints, Ints] | None:
    """Return the stored ranges of some samples, in order; files of one field count as one."""
    column = layout.columns.get(name)
    if column is not None and column.grid is not None:
        _, rows = rows_of(column, local)
        if len(rows) and int(np.abs(rows).max()) > _SLICE * max(1, column.grid.chunk[0]):
            return None  # a sample of that size takes as many reads as it has chunks
    if layout.records is not None and name in layout.records.parts:
        records = layout.records
        numbers = local if records.order is None else records.order.at(local)
        return records.blocks.offsets.at(numbers), records.blocks.lengths.at(numbers)
    ranges = locate(layout, name, local)
    offset, length = ranges.offset, ranges.length
    if ranges.file_index is not None and len(offset):
        new = np.zeros(len(offset), np.int64)
        new[1:] = (np.diff(ranges.file_index, axis=1) != 0).any(axis=0)
        offset = offset + np.cumsum(new) * _APART
    kept = ranges.offset >= 0
    return offset[kept], length[kept]
