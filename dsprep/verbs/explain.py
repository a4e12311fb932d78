"""What a sidecar says, in words: where samples lie, by which law, and how reading them will go.

Everything is told by the sidecar itself and the sizes of the files; no sample is read. Of large
datasets samples spread evenly are looked at, and what is estimated from them is marked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dsprep.core.packing import Tables
from dsprep.core.schema import Field, Schema, show_dtype
from dsprep.errors import DsprepError
from dsprep.formats import FRAMES, RECIPES
from dsprep.layout import as_json
from dsprep.layout.laws import Affine, Law, Runs
from dsprep.layout.model import Blocks, Column, FileLayout, Records
from dsprep.reading.proofs import said
from dsprep.sidecar import spec
from dsprep.sidecar.sidecar import Sidecar
from dsprep.verbs import statistics
from dsprep.write.create_sidecar import Made


@dataclass(frozen=True)
class FieldWords:
    """Where a field of a file lies.

    Attributes
    ----------
    field
        Its name.
    type
        Its type and shape.
    stored
        What it is stored in.
    offsets, lengths
        The laws in words; empty if it has no places.
    decode
        What turns the stored bytes into values, step by step.
    unlocated
        Why only the format's library can read it; None: it has places.
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
    """What files have in common that have one layout.

    Attributes
    ----------
    files, samples
        How many files have it, and their samples.
    fields
        The fields, in the schema's order.
    groups
        How samples are grouped; empty if they are not.
    checksums
        What each field can be compared with; empty if that cannot be told without the data.
    facts
        How the files were made, as far as it shows.
    history
        The same as a sentence; empty if nothing is known.
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
    """What a sidecar says.

    Attributes
    ----------
    path, dataset
        The sidecar, and what it describes.
    format, files, samples
        Of the dataset.
    nbytes
        Of the sidecar and its companion.
    data_nbytes
        Of all files.
    payload_nbytes
        Bytes of the files that hold samples; None where no field has a place.
    exact
        Whether they were added up, not estimated.
    runs
        Contiguous ranges that a read of `run_samples` consecutive samples takes, on the average;
        ranges that are less than 64 KiB apart count as one. None if no field has a place.
    run_samples
        1,000, or all if there are fewer.
    layouts
        How the files lie.
    lineage, notes
        As in the sidecar.
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
    """Return what a sidecar says.

    Raises
    ------
    FormatError
        If it is damaged.
    """
    content = opened.content
    payload, exact = statistics.payload(opened)
    return Explanation(
        str(opened.path),
        str(opened.dataset),
        content.format,
        len(content.files),
        len(opened),
        len(spec.dump(opened.content).encode()) + _companion_nbytes(opened),
        sum(f.identity.nbytes for f in content.files),
        payload,
        exact,
        statistics.runs(opened),
        min(statistics.IN_A_ROW, len(opened)),
        tuple(_layouts(opened)),
        content.lineage,
        content.notes,
    )


def _companion_nbytes(opened: Sidecar) -> int:
    """Return the bytes of the companion, as the sidecar says."""
    return int((opened.content.companion or {}).get("nbytes", 0))


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
            "" if groups is None else f"{groups.samples:,} samples, at {_law(groups.blocks)}",
            _checksums(opened, numbers[0]),
            layout.facts,
            history(layout.facts),
        )


def _checksums(opened: Sidecar, number: int) -> str:
    try:
        return said(opened.proofs.describe([number], opened.schema.names))
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
            laws[words.field] = f"has no places: {words.unlocated}"
        else:
            laws[words.field] = words.offsets or words.stored
    if len(content.layouts) > 1:
        more = f" ({len(content.layouts):,} layouts, this is the first)"
        laws = {name: law + more for name, law in laws.items()}
    return laws


# --- words -----------------------------------------------------------------------------------


def fields_of(layout: FileLayout, schema: Schema) -> Iterator[FieldWords]:
    """Yield where each field lies, in words."""
    for field in schema:
        name = field.name
        if layout.records is not None and name in layout.records.parts:
            yield _record_words(layout.records, field)
        elif name in layout.columns:
            yield _column_words(layout.columns[name], field)
        else:
            reason = layout.unlocated.get(name, "it is not in the layout")
            yield FieldWords(name, str(field), "by the format's own library", unlocated=reason)


def _law(blocks: Blocks) -> str:
    return blocks.offsets.words()


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
        _law(records.blocks),
        _bytes(records.blocks.lengths),
        tuple(steps),
    )


def _column_words(column: Column, field: Field) -> FieldWords:
    grid = column.grid
    if grid is None:
        return FieldWords(field.name, str(field), "nothing: it has no bytes")
    where = f" of {grid.blocks.path}" if grid.blocks.path else ""
    shape = " x ".join(f"{n:,}" for n in grid.shape)
    if grid.block_count == 1 and grid.plain:
        stored = f"an array of {shape}, in one piece{where}"
    else:
        chunk = " x ".join(f"{n:,}" for n in grid.chunk)
        chunks = "a chunk" if grid.block_count == 1 else f"{grid.block_count:,} chunks"
        stored = f"an array of {shape}, in {chunks} of {chunk}{where}"
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
    offsets, lengths = _law(grid.blocks), _bytes(grid.blocks.lengths)
    base = grid.blocks.offsets
    if grid.block_count == 1 and grid.plain and isinstance(base, Affine) and base.base >= 0:
        rows = 1 if column.first is not None else column.lines
        of = "row" if column.first is not None else "i"
        offsets = f"{base.base:,} + {of} * {rows * grid.row_nbytes:,}"
        lengths = f"{rows * grid.row_nbytes:,} bytes{' a row' if of == 'row' else ''}"
    return FieldWords(field.name, str(field), stored, offsets, lengths, tuple(steps))


def _called(json: Mapping[str, Any], key: str = "name") -> str:
    rest = {k: v for k, v in json.items() if k != key and isinstance(v, int | str | float)}
    inside = ", ".join(f"{k} {v}" for k, v in rest.items())
    return f"{json.get(key)} ({inside})" if inside else str(json.get(key))


def _typed(field: Field) -> list[str]:
    if field.kind != "array":
        return ["as it is" if field.kind == "bytes" else "UTF-8"]
    order = "little-endian " if field.dtype.str[0] == "<" and field.dtype.itemsize > 1 else ""
    return [f"read as {order}{show_dtype(field.dtype)}"]


def history(facts: Mapping[str, Any]) -> str:
    """Return how a file was made as a sentence; empty if nothing is known."""
    if not facts:
        return ""
    said = []
    known = dict(facts)

    def tell(key: str, text: str) -> None:
        if key in known:
            value = known.pop(key)
            said.append(text.format(f"{value:,}" if isinstance(value, int) else value))

    tell("order", "with {}")
    interval, several = known.pop("commit interval", None), known.pop("commit interval range", None)
    if isinstance(interval, int):
        said.append(f"{interval:,} records per transaction")
        if isinstance(several, list) and len(several) == 2:
            said[-1] += f" (any number from {several[0]:,} to {several[1]:,} gives the same file)"
    elif interval is not None:
        said.append(f"in {interval}")
    if (append := known.pop("append", None)) is not None:
        said.append("with MDB_APPEND" if append else "without MDB_APPEND")
    if (compact := known.pop("copied compactly", None)) is not None and compact:
        said.append("and copied compactly")
    if (database := known.pop("database", None)) is not None:
        said.append(f"in the {database} database")
    tell("record size", "values of {} bytes")
    if (place := known.pop("values", None)) is not None and said:
        said[-1] += f" {place}"
    tell("key size", "keys of {} bytes")
    tell("leaf capacity", "{} records per leaf")
    tell("branch capacity", "{} children per branch")
    tell("page size", "pages of {} bytes")
    tell("meta pages", "{} meta pages")
    said += [f"{key} {value}" for key, value in known.items()]
    return f"Records were put {', '.join(said)}."
