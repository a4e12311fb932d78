"""A BP dataset as samples: its steps, or the rows of its arrays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from importlib.util import find_spec
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from dsprep.core.closing import failure_closes
from dsprep.core.schema import Array, Field, Ints, Ragged
from dsprep.core.schema import Column as Values
from dsprep.errors import (
    AmbiguousError,
    FormatError,
    MissingExtra,
    UnsupportedError,
    UsageError,
)
from dsprep.formats import samples
from dsprep.formats.fields import missing_field
from dsprep.formats.located import LazyField, LocatedSource, Parsed, Unlocated
from dsprep.formats.options import OpenOptions
from dsprep.layout.describe import FieldStorage
from dsprep.layout.model import Column, FileLayout
from dsprep.storage.identity import Identity, check
from dsprep.storage.paths import open_file

WAIT = 60.0
"""Seconds without an answer after which a file is taken to be cut or damaged."""

ADDRESSES = 4 << 30
"""Bytes of address space that ADIOS2 takes besides what is decoded."""


class Library:
    """ADIOS2 in a process of its own; see `server`. It answers one question at a time."""

    def __init__(self, path: Path, memory: int) -> None:
        if find_spec("adios2") is None:
            raise MissingExtra("reading BP needs adios2", fix="pip install 'dsprep[adios2]'")
        self.identity = Identity.of(path)
        self._path, self._lock = path, threading.Lock()
        self._link, theirs = Pipe()
        words = [str(theirs.fileno()), os.fspath(path), str(memory + ADDRESSES)]
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("server.py")), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        theirs.close()

    def answer(self, *question: Any, into: Array | None = None) -> Any:
        """Return the answer, of which an array goes into `into`; the description, if none is asked.

        Raises
        ------
        FormatError
            If ADIOS2 cannot read the dataset.
        """
        problem = f"ADIOS2 did not answer within {WAIT:.0f} s"
        with self._lock:
            try:
                if question:
                    self._link.send_bytes(json.dumps(question).encode())
                if self._link.poll(WAIT):
                    answer = json.loads(self._link.recv_bytes())
                    if into is not None and answer == {}:
                        self._link.recv_bytes_into(into.reshape(-1).data)
                    if not isinstance(answer, dict) or "error" not in answer:
                        check(((self._path, self.identity),))
                        return answer
                    problem = " ".join(answer["error"].split())[:200]
            except (EOFError, OSError):
                problem = "ADIOS2 crashed"
            self.close()
        where = f"{self._path}, {question[0]}" if question else self._path
        fix = "look for a file that is cut or missing: bpls -l"
        raise FormatError(f"the dataset cannot be read: {problem}", where=where, fix=fix)

    def close(self) -> None:
        """End it."""
        self._link.close()
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True)
class AdiosField(LazyField):
    """A field: sample i has `rows[i]` rows of a variable, in order; None: row i."""

    library: Library
    variable: str
    field: Field
    rows: Ints | None = None

    @override
    def locate(self) -> Column:
        raise Unlocated("samples of BP are read by ADIOS2 alone; dsprep convert gives them places")

    @override
    def read(self, start: int, stop: int) -> Values:
        field, row, counts = self.field, start, np.ones(stop - start, np.int64)
        if self.rows is not None:
            row, counts = int(self.rows[:start].sum()), self.rows[start:stop]
        inner: Any = field.inner if self.rows is None else field.shape[1:]
        out = np.empty((int(counts.sum()), *inner), field.dtype)
        if out.size:
            self.library.answer(self.variable, row, row + len(out), into=out)
        if field.ragged:
            return Ragged.from_lengths(out, counts)
        return out.reshape(stop - start, *field.inner)

    @override
    def storage(self) -> FieldStorage:
        access = "read by ADIOS2 in a process of its own"
        return FieldStorage(storage="blocks of steps and writers", access=access)


def open_adios(path: Path, options: OpenOptions) -> LocatedSource:
    """Open a BP dataset for reading; see `base.Format.open`."""
    if options.sample_axis == "groups":
        raise UsageError("BP has no groups: --sample-axis groups", where=path)
    library = Library(path, options.memory_limit)
    with failure_closes(library.close):
        parsed = _parsed(library, options, path)
        source = LocatedSource(path, parsed, options, open_file, library.close)
    source.random_access = False
    return source


def _parsed(library: Library, options: OpenOptions, path: Path) -> Parsed:
    """Decide which variables are fields, and what their samples are."""
    described = library.answer()
    steps, variables = described["steps"], described["variables"]
    attrs = {name: _attribute(value) for name, value in described["attributes"].items()}
    requested = [spec.spelled for spec in options.fields]
    for name in requested:
        if name not in variables:
            raise missing_field(name, variables, path)
        if problem := variables[name]["problem"]:
            raise UnsupportedError(f"{name} is not a field: {problem}", where=path)
    usable = {n: variables[n] for n in requested or variables if not variables[n]["problem"]}
    notes = [f"left out {n}: {v['problem']}" for n, v in variables.items() if v["problem"]]
    if not usable or not steps:
        problem = "no variable can be a field"
        raise FormatError(problem, where=path, found="; ".join(notes) or "no steps")
    values = {n: Field(n, np.dtype(v["type"]), tuple(v["inner"])) for n, v in usable.items()}
    rows = {n: np.array(v["rows"], np.int64) for n, v in usable.items() if v["rows"]}
    totals = {n: (int(each.sum()), *values[n].inner) for n, each in rows.items()}
    sized = {
        n: samples.Sized(totals.get(n, ()), totals.get(n, (1,))[0] * f.row_nbytes)
        for n, f in values.items()
    }
    mode: Any = options.sample_axis
    if mode == "auto" and rows and steps > 1:
        readings = [
            ("--sample-axis none", f"{steps} samples, a step each"),
            ("--sample-axis first", f"samples that are rows of {samples.listed([*rows])}"),
        ]
        reason = "a sample may be a step, or a row of its arrays"
        raise AmbiguousError(reason, readings, where=path, fix="name some variables: --field NAME")
    axis = samples.choose(sized, mode if rows else "none", path, named=bool(requested))
    notes += (n.replace(samples.STATIC, "of another length") for n in axis.notes)
    lazy = {}
    for n in axis.names:
        own = {k.rpartition("/")[2]: v for k, v in attrs.items() if k.rpartition("/")[0] == n}
        field, by_step = replace(values[n], attrs=own), axis.whole_file and n in rows
        if by_step:  # ragged where steps differ in length
            length = int(rows[n][0]) if (rows[n] == rows[n][0]).all() else None
            field = replace(field, shape=(length, *field.inner))
        lazy[n] = AdiosField(library, n, field, rows[n] if by_step else None)
    return Parsed(
        version="ADIOS2 BP",
        fields={n: each.field for n, each in lazy.items()},
        layout=FileLayout(steps if axis.whole_file else axis.count),
        lazy=lazy,
        attrs={n: v for n, v in attrs.items() if n.rpartition("/")[0] not in variables},
        notes=() if requested else tuple(notes),
    )


def _attribute(value: Any) -> Any:
    return np.array(value["values"], value["dtype"])[()] if isinstance(value, dict) else value
