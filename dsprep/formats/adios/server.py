"""The program that reads a BP dataset by ADIOS2 for `source`, which tells it what over a pipe.

On damaged files ADIOS2 crashes, waits for ever or takes all memory: not in the user's process.
"""

from __future__ import annotations

import itertools
import json
import math
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import adios2
import numpy as np

TYPES = {"float": "<f4", "double": "<f8", "float complex": "<c8", "double complex": "<c16"}
TYPES |= {"char": "<i1"}
TYPES |= {f"{sign}int{8 * n}_t": f"<{sign or 'i'}{n}" for sign in ("", "u") for n in (1, 2, 4, 8)}
TEXT = "string"
MAX_ATTRIBUTE = 8192


class Dataset:
    """A BP dataset of which every variable is read as one table: the rows of all steps.

    A variable without axes has a row in each step.
    """

    def __init__(self, path: str) -> None:
        self._io = adios2.Adios().declare_io("dsprep")
        self._io.set_parameters({"OpenTimeoutSecs": "1", "Profile": "Off"})
        self._engine = self._io.open(path, adios2.bindings.Mode.ReadRandomAccess)
        self._steps = self._engine.steps()
        self._tables = {name: self._describe(name) for name in self._io.available_variables()}

    def describe(self) -> dict[str, Any]:
        """Return the steps, variables and attributes."""
        attrs = {name: self._attribute(name) for name in self._io.available_attributes()}
        kept = {name: value for name, value in attrs.items() if value is not None}
        return {"steps": self._steps, "variables": self._tables, "attributes": kept}

    def _describe(self, name: str) -> dict[str, Any]:
        variable, kinds = self._io.inquire_variable(name), adios2.bindings.ShapeID
        kind, stored, present = variable.shape_id(), variable.type(), variable.steps()
        table = {"type": TYPES.get(stored, stored), "rows": None, "inner": [], "problem": ""}
        if stored not in TYPES:
            return {**table, "problem": f"the type {stored} is not read"}
        if present != self._steps:
            return {**table, "problem": f"it is in {present} of {self._steps} steps"}
        if kind == kinds.GlobalValue:
            return table
        if kind != kinds.GlobalArray:
            return {**table, "problem": "its blocks are arrays of their own, not parts of one"}
        shapes = [list(variable.shape(step)) for step in range(self._steps)]
        if any(shape[1:] != shapes[0][1:] for shape in shapes):
            return {**table, "problem": "its shape changes, and not only along the first axis"}
        for step, shape in enumerate(shapes):
            variable.set_step_selection([step, 1])
            if sum(_block_sizes(variable)) != math.prod(shape):
                return {**table, "problem": f"its blocks of step {step} do not fill it once"}
        return {**table, "rows": [shape[0] for shape in shapes], "inner": shapes[0][1:]}

    def _attribute(self, name: str) -> Any:
        attribute = self._io.inquire_attribute(name)
        if attribute.type() == TEXT:
            return attribute.data_string()
        values = np.asarray(attribute.data())
        if values.dtype.kind not in "iuf" or values.size > MAX_ATTRIBUTE:
            return None
        return {"dtype": values.dtype.str, "values": values.tolist()}

    def read(self, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return some rows of a variable."""
        table, variable = self._tables[name], self._io.inquire_variable(name)
        rows, inner = table["rows"] or [1] * self._steps, table["inner"]
        ends = np.cumsum(rows)
        out = np.zeros((stop - start, *inner), table["type"])
        row = start
        while row < stop:
            step = int(np.searchsorted(ends, row, "right"))
            count = min(stop, int(ends[step])) - row
            variable.set_step_selection([step, 1])
            if table["rows"]:
                begin = row - (int(ends[step]) - rows[step])
                variable.set_selection([[begin, *[0] * len(inner)], [count, *inner]])
            part = out[row - start : row - start + count]
            self._engine.get(variable, part, adios2.bindings.Mode.Sync)
            row += count
        return out


def _block_sizes(variable: Any) -> Iterator[int]:
    """Yield the elements of each block of a step; ``blocks_info`` fails on integers of a byte."""
    with suppress(ValueError):  # there is no such block
        for number in itertools.count():
            variable.set_block_selection(number)
            yield math.prod(variable.count())


def serve(link: Connection, path: str) -> None:
    """Describe a dataset, and then send the rows that are asked for, until nobody listens."""
    try:
        dataset = Dataset(path)
        link.send_bytes(json.dumps(dataset.describe()).encode())
        while True:
            values = dataset.read(*json.loads(link.recv_bytes()))
            link.send_bytes(b"{}")
            link.send_bytes(values.data)
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:
        link.send_bytes(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[3]),) * 2)
    serve(Connection(int(sys.argv[1])), sys.argv[2])
