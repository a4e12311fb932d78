"""NumPy's array files: ``.npy``, ``.npz``, and directories of them. Only read.

A file
    One field, called as the file is; samples along the first axis.
A ZIP file
    Its members are fields. Those that are stored are read in place, deflated ones are decoded
    as a whole.
A directory
    Its files are fields, unless they are alike and their names differ in a number alone: then
    each is a file of the dataset, and ``sample_axis`` says whether it is one sample (whose first
    axis may vary from file to file) or holds samples along its first axis.

Nothing is unpickled: arrays of Python objects are refused by their header.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from dsprep.core.schema import Field, Schema
from dsprep.errors import SchemaError
from dsprep.formats.base import Format, Source
from dsprep.formats.foreign import WAY_OUT
from dsprep.formats.options import OpenOptions, check_options
from dsprep.storage.paths import Candidate

_NUMBER = re.compile(r"[-_. ]*[0-9]+$")


class Numpy(Format):
    """The format; see `base.Format`."""

    name: ClassVar[str] = "numpy"
    suffixes: ClassVar[tuple[str, ...]] = (".npy", ".npz")
    open_options: ClassVar[frozenset[str]] = frozenset({"fields", "follow_external", "sample_axis"})
    infers: ClassVar[bool] = True
    doubtful: ClassVar[bool] = True

    def recognises(self, candidate: Candidate) -> bool:
        """Return whether it is an array, a ZIP file called ``.npz``, or a directory of fields."""
        from dsprep.formats import npy_header
        from dsprep.formats.npy import arrays

        if candidate.is_directory:
            return arrays.are_fields(candidate.path)
        if candidate.head.startswith(b"PK"):
            return candidate.path.name.lower().endswith(".npz")
        return candidate.head.startswith(npy_header.MAGIC)

    @override
    def open(self, path: Path, options: OpenOptions, hint: Schema | None) -> Source:
        # `hint` names the array of a file, and says what varies.
        from dsprep.formats.npy.source import open_numpy

        check_options(options, self.open_options, self.name)
        return open_numpy(path, options, hint)

    def merge(self, one: Schema, other: Schema, options: OpenOptions) -> Schema | None:
        """Return the common names of files of one array each, and which first axes vary."""
        own = other
        if alone := len(one) == len(other) == 1:
            (a,), (b,) = one, other
            name = common_name(a.name, b.name)
            if (name, b.dtype, b.shape) == (a.name, a.dtype, a.shape):  # of many files, most
                return one
            one, other = (s.replace(replace(s.fields[0], name=name)) for s in (one, other))
        merged = _together(one, other, whole_file=options.sample_axis == "none")
        if merged is None and alone:
            raise SchemaError(
                "the arrays of files that are samples of one field differ in more than their "
                "first axis",
                found=f"{one} before {own}",
                fix="name those that are alike; if the files hold fields of the same samples, "
                f"take them together with --join; or {WAY_OUT}",
            )
        return merged


def common_name(a: str, b: str) -> str:
    """Return what the arrays of two files are called: as both without a number at the end.

    >>> common_name("img_0001", "img_0002"), common_name("0001", "0002")
    ('img', 'array')
    """
    a, b = _NUMBER.sub("", a), _NUMBER.sub("", b)
    return a if a == b and a else "array"


def _together(a: Schema, b: Schema, *, whole_file: bool) -> Schema | None:
    """Return the fields of two files; first axes may vary if a `whole_file` is a sample."""
    if a.names != b.names:
        return None
    fields: list[Field] = []
    for f, g in zip(a, b, strict=True):
        if (f.dtype, f.shape) == (g.dtype, g.shape):
            fields.append(f)
        elif (
            whole_file and f.dtype == g.dtype and f.shape and g.shape and f.shape[1:] == g.shape[1:]
        ):
            fields.append(replace(f, shape=(None, *f.shape[1:])))
        else:
            return None
    return a.replace(*fields)
