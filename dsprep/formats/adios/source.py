"""A BP dataset as samples: its steps, or the rows of its arrays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from dsprep.core.schema import Arena, Array, Batch, Column, Field, Ints, Ragged, Schema
from dsprep.errors import (
    AmbiguousError,
    FormatError,
    MissingExtra,
    UnsupportedError,
    UsageError,
)
from dsprep.formats import samples
from dsprep.formats.base import Source
from dsprep.formats.fields import missing_field, wanted
from dsprep.formats.options import OpenOptions
from dsprep.layout.describe import FieldStorage
from dsprep.layout.model import FileLayout
from dsprep.storage.identity import Identity, check

WAIT = 60.0
"""Seconds without an answer after which a file is taken to be cut or damaged."""

EXPANDED = 4096
"""How often as large as their files values may be."""

ADDRESSES = 4 << 30
"""Bytes of address space that ADIOS2 takes besides what is decoded."""


class Library:
    """ADIOS2 in a process of its own; see `server`. It answers one question at a time."""

    def __init__(self, path: Path, memory: int) -> None:
        if find_spec("adios2") is None:
            raise MissingExtra("reading BP needs adios2", fix="pip install 'dsprep[adios2]'")
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


class _Column(NamedTuple):
    """A field: sample i has `rows[i]` rows of a variable from `first[i]` on; None: row i."""

    variable: str
    field: Field
    first: Ints | None = None
    rows: Ints | None = None


class AdiosSource(Source):
    """A BP dataset opened for reading; see `base.Source`."""

    def __init__(self, path: Path, options: OpenOptions) -> None:
        if options.sample_axis == "groups":
            raise UsageError("BP has no groups: --sample-axis groups", where=path)
        self.path, self.version, self._identity = path, "ADIOS2 BP", Identity.of(path)
        self._library = Library(path, options.limit)
        try:
            self._choose(self._library.answer(), options)
            check(((path, self._identity),))
        except BaseException:
            self.close()
            raise

    # --- what a sample is ---

    def _choose(self, described: Mapping[str, Any], options: OpenOptions) -> None:
        """Decide which variables are fields, and what their samples are."""
        steps, variables = described["steps"], described["variables"]
        attrs = {name: _attribute(value) for name, value in described["attributes"].items()}
        requested = [spec.spelled for spec in options.fields]
        for name in requested:
            if name not in variables:
                raise missing_field(name, variables, self.path)
            if problem := variables[name]["problem"]:
                raise UnsupportedError(f"{name} is not a field: {problem}", where=self.path)
        usable = {n: variables[n] for n in requested or variables if not variables[n]["problem"]}
        notes = [f"left out {n}: {v['problem']}" for n, v in variables.items() if v["problem"]]
        if not usable or not steps:
            found = "; ".join(notes) or "no steps"
            raise FormatError("no variable can be a field", where=self.path, found=found)
        _check_nbytes(usable, self.path, self._identity.nbytes)
        columns = self._columns(steps, usable, options, notes)
        fields = {c.variable: replace(c.field, attrs=_own(c.variable, attrs)) for c in columns}
        by_name = {c.variable: c for c in columns}
        self._chosen = [by_name[n]._replace(field=f) for n, f in wanted(options.fields, fields)]
        rest = {n: v for n, v in attrs.items() if n.rpartition("/")[0] not in variables}
        self.schema = Schema(tuple(c.field for c in self._chosen), rest)
        self.notes = () if requested else tuple(notes)

    def _columns(
        self, steps: int, usable: Mapping[str, Any], options: OpenOptions, notes: list[str]
    ) -> list[_Column]:
        """Return the fields where each step is a sample, or each row of the first axis."""
        rows = {n: np.array(v["rows"], np.int64) for n, v in usable.items() if v["rows"]}
        sized = {
            n: samples.Sized((sum(v["rows"]), *v["inner"]) if n in rows else (), _nbytes(n, v))
            for n, v in usable.items()
        }
        mode: Any = options.sample_axis
        if mode == "auto" and rows and steps > 1:
            by_rows = {sized[n].shape[0]: n for n in reversed(rows)}
            gives = " or ".join(f"{count} samples of {n}" for count, n in by_rows.items())
            readings = [
                ("--sample-axis none", f"{steps} samples, a step each"),
                ("--sample-axis first", f"{gives}, a row each"),
            ]
            reason = "a sample may be a step, or a row of its arrays"
            fix = "name some variables: --field NAME"
            raise AmbiguousError(reason, readings, where=self.path, fix=fix)
        named = bool(options.fields)
        axis = samples.choose(sized, mode if rows else "none", self.path, named=named)
        notes += (n.replace(samples.STATIC, "of another length") for n in axis.notes)
        self._count = steps if axis.whole_file else axis.count
        if not axis.whole_file:
            return [_Column(n, _row(n, usable[n])) for n in axis.names]
        return [_by_step(n, usable[n], rows.get(n)) for n in axis.names]

    # --- reading ---

    def __len__(self) -> int:
        return self._count

    @override
    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        batch = {c.field.name: self._read(c, start, stop) for c in self._chosen}
        check(((self.path, self._identity),))
        return batch

    def _read(self, column: _Column, start: int, stop: int) -> Column:
        name, field = column.variable, column.field
        if column.first is None or column.rows is None:
            out = np.empty((stop - start, *field.inner), field.dtype)
            if out.size:
                self._library.answer(name, start, stop, into=out)
            return out
        rows = column.rows[start:stop]
        offsets = np.concatenate([[0], np.cumsum(rows)])
        inner: Any = field.shape[1:]
        out = np.empty((int(offsets[-1]), *inner), field.dtype)
        if out.size:
            row = int(column.first[start])
            self._library.answer(name, row, row + len(out), into=out)
        if field.ragged:
            return Ragged(out, offsets)
        return out.reshape(stop - start, *field.shape)

    def storage(self) -> dict[str, FieldStorage]:
        """Return how each field is stored."""
        access = "read by ADIOS2 in a process of its own"
        stored = FieldStorage(storage="blocks of steps and writers", access=access)
        return {c.field.name: stored for c in self._chosen}

    def extents(self, progress: object = None) -> FileLayout:
        """Raise `UnsupportedError`: see `Source.extents`."""
        raise UnsupportedError(
            "samples of BP are read by ADIOS2 alone",
            where=self.path,
            fix="dsprep repack DATA DST (or convert) makes a file for dsprep.Reader",
        )

    def close(self) -> None:
        """End the process that reads."""
        self._library.close()


def _row(name: str, table: Mapping[str, Any]) -> Field:
    return Field(name, np.dtype(table["type"]), tuple(table["inner"]))


def _nbytes(name: str, table: Mapping[str, Any]) -> int:
    return int(sum(table["rows"] or [1])) * _row(name, table).row_nbytes


def _check_nbytes(tables: Mapping[str, Any], path: Path, stored: int) -> None:
    """Raise `FormatError` for more values than any compressor puts into as many bytes."""
    nbytes = sum(_nbytes(name, table) for name, table in tables.items())
    if nbytes > EXPANDED * stored:
        found = f"{nbytes} bytes of values in files of {stored}"
        raise FormatError("the dataset is damaged", where=path, found=found)


def _by_step(name: str, table: Mapping[str, Any], rows: Ints | None) -> _Column:
    """Return a variable of which each step is a sample, ragged where they differ in length."""
    field = _row(name, table)
    if rows is None:
        return _Column(name, field)
    axis = int(rows[0]) if (rows == rows[0]).all() else None
    return _Column(name, replace(field, shape=(axis, *field.shape)), np.cumsum(rows) - rows, rows)


def _own(name: str, attrs: Mapping[str, Any]) -> dict[str, Any]:
    return {n.rpartition("/")[2]: v for n, v in attrs.items() if n.rpartition("/")[0] == name}


def _attribute(value: Any) -> Any:
    return np.array(value["values"], value["dtype"])[()] if isinstance(value, dict) else value
