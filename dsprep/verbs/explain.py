"""The statements of a sidecar in words: the places of samples, their laws and their storage.

All of it follows from the sidecar; no sample is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from dsprep.core.packing import Tables
from dsprep.core.schema import Field, Schema
from dsprep.errors import DsprepError
from dsprep.layout import as_json
from dsprep.layout.describe import of_layout
from dsprep.layout.model import Column, FileLayout, Given, Records
from dsprep.layout.plain import plain
from dsprep.sidecar import spec
from dsprep.sidecar.entries import numbers
from dsprep.sidecar.proofs import summarize
from dsprep.sidecar.sidecar import Sidecar
from dsprep.writing.create_sidecar import NewSidecar


def explain(opened: Sidecar) -> dict[str, Any]:
    """Return the contents of a sidecar for a person, as JSON.

    Files of one layout are one entry of ``layouts``, with the words for each field.

    Raises
    ------
    FormatError
        If it is damaged.
    """
    content = opened.content
    return {
        "sidecar": str(opened.path),
        "nbytes": sum(map(len, spec.encode(content, opened.companion() or b""))),
        "dataset": str(opened.dataset),
        "format": content.format,
        "files": len(content.files),
        "samples": len(opened),
        "data_nbytes": content.nbytes,
        "layouts": list(_layouts(opened)),
        "lineage": dict(content.lineage),
        "notes": list(content.notes),
    }


def _layouts(opened: Sidecar) -> Iterator[dict[str, Any]]:
    kinds, counts = numbers(opened.content.files, "layout"), opened.content.counts
    for first in np.sort(np.unique(kinds, return_index=True)[1]).tolist():
        alike = kinds == kinds[first]
        layout, checksums = opened.layout(first), ""
        with suppress(DsprepError, OSError):  # the data are gone, or damaged
            checksums = summarize(opened.proofs.describe([first], opened.schema.names))
        blocks = None if layout.groups is None else layout.groups.blocks.offsets.words()
        yield {
            "files": int(alike.sum()),
            "samples": int(counts[alike].sum()),
            "fields": list(_fields(layout, opened.schema)),
            "groups": layout.groups and f"{layout.groups.samples:,} samples, at {blocks}",
            "checksums": checksums,
            "made with": dict(layout.facts),
        }


def laws_of(made: NewSidecar) -> dict[str, str]:
    """Return the law of each field of a new sidecar; of the first layout, if there are several."""
    content = made.content
    if not content.files or not content.layouts:
        return {}
    first = next((f for f in content.files if f.samples), content.files[0])
    tables, json = Tables(made.companion or None, made.path), content.layouts[first.layout]
    layout = as_json.from_json(json, first.samples, content.schema, tables)
    several, laws = len(content.layouts), {}
    for words in _fields(layout, content.schema):
        law = words.get("no offsets") or words.get("offsets") or words["stored"]
        laws[words["field"]] = f"has no offsets: {law}" if "no offsets" in words else law
        laws[words["field"]] += f" (in the first of {several:,} layouts)" * (several > 1)
    return laws


def _fields(layout: FileLayout, schema: Schema) -> Iterator[dict[str, str]]:
    """Yield the storage of each field, in words."""
    storage_of = of_layout(layout, schema)
    for field in schema:
        stored = storage_of[field.name]
        codecs = "".join(f", {codec}" for codec in stored.codecs)
        words = {"field": field.name, "type": str(field), "stored": stored.storage + codecs}
        located = layout.find_field(field.name)
        if isinstance(located, str):
            yield {**words, "no offsets": located}
        else:
            yield {**words, **_offsets(layout, field, located), "access": stored.access}


def _offsets(layout: FileLayout, field: Field, located: object) -> dict[str, str]:
    """Return the laws of a field that is located: offsets and lengths of what holds samples."""
    if isinstance(located, Given):
        return {"values": located.value_numbers.words()}
    ranges = plain(layout, [field]) if field.row_nbytes and layout.count else None
    if ranges and (base := ranges[0].base) is not None:
        nbytes = ranges[0].nbytes
        return {"offsets": f"{base:,} + i * {nbytes:,}", "lengths": f"{nbytes:,} bytes"}
    holder = located.grid if isinstance(located, Column) else located
    blocks = getattr(holder, "blocks", None)
    if blocks is None:
        return {}
    words = {"offsets": blocks.offsets.words(), "lengths": f"{blocks.lengths.words()} bytes"}
    if isinstance(located, Records):
        part = located.parts[field.name]
        if part.at is not None:
            end = "the end" if part.nbytes is None else f"{part.at + part.nbytes:,}"
            words["inside"] = f"bytes {part.at:,} to {end}"
        elif located.recipe is not None:
            words["inside"] = f"found by the recipe {located.recipe.get('name')}"
    elif isinstance(located, Column) and located.first is not None and located.count is not None:
        words["rows"] = f"{located.count.words()}, from {located.first.words()} on"
    return words
