"""Hugging Face datasets: an Arrow file, mapped into memory.

Fields are lists of a fixed length. The format "arrow" decodes nothing, and a slice refers to the
mapped file: https://huggingface.co/docs/datasets/about_arrow ("Memory-mapping"). Slices are the
fast way, since a dataset that was shuffled is an order of magnitude slower:
https://huggingface.co/docs/datasets/about_mapstyle_vs_iterable ("Speed differences").
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from dsprep.bench.strategies.peers import Ranges, blocks, names, stored
from dsprep.core.schema import Array
from dsprep.formats.base import Source


def batches(source: Source) -> Iterator[Any]:
    """Yield record batches of all samples, 8 MiB each."""
    import pyarrow

    for _, columns in blocks(source):
        lists = [
            pyarrow.FixedSizeListArray.from_arrays(column.reshape(-1), column[0].size)
            for column in columns.values()
        ]
        yield pyarrow.RecordBatch.from_arrays(lists, list(columns))


class Arrow(Ranges):
    """Slices of a Dataset."""

    project: ClassVar[str] = "datasets"

    @classmethod
    def save(cls, source: Source, target: Path) -> None:
        """Write the Arrow file."""
        datasets = _offline()
        from datasets.arrow_writer import ArrowWriter
        from pyarrow import Table

        features = {}
        for name, f in zip(names(source.schema), source.schema, strict=True):
            dtype, shape = stored(f)
            length = 1
            for n in shape:
                length *= n
            features[name] = datasets.List(datasets.Value(dtype.name), length=length)
        with ArrowWriter(path=str(target), features=datasets.Features(features)) as writer:
            for batch in batches(source):
                writer.write_table(Table.from_batches([batch]))
            writer.finalize()

    def made(self, resources: ExitStack) -> Any:
        """Map the file."""
        return _offline().Dataset.from_file(str(self.task.path)).with_format("arrow")

    def rows(self, start: int, stop: int) -> list[Array]:
        """Return a slice, which refers to the mapped file where it has one record batch."""
        table = self.loader[start:stop]
        columns = [table[name].combine_chunks() for name in names(self.task.schema)]
        return [c.flatten().to_numpy().reshape(stop - start, -1) for c in columns]


def _offline() -> Any:
    """Import datasets, and keep it from asking the network."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import datasets

    return datasets
