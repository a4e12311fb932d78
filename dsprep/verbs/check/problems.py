"""A problem of a sidecar or its data, as `dsprep.verbs.check` reports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsprep.errors import DsprepError


@dataclass(frozen=True)
class Problem:
    """Something that is wrong.

    Attributes
    ----------
    file
        The data file or the sidecar.
    what
        What is wrong, as a clause.
    expected, found
        The two things that disagree; None where there are none.
    field, sample
        What it is about, if it is about one; the sample's number in the dataset.
    """

    file: str
    what: str
    expected: Any = None
    found: Any = None
    field: str | None = None
    sample: int | None = None

    def __str__(self) -> str:
        where = [self.file]
        if self.sample is not None:
            where.append(f"sample {self.sample:,}")
        if self.field is not None:
            where.append(f"field {self.field}")
        facts = [
            f"{word} {value}"
            for word, value in (("expected", self.expected), ("found", self.found))
            if value is not None
        ]
        return f"{', '.join(where)}: {self.what}" + (f" ({', '.join(facts)})" if facts else "")

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON, without what is None."""
        return {k: v for k, v in vars(self).items() if v is not None}


def problem(error: Exception, file: object, field: str | None = None) -> Problem:
    """Return the problem that an error states."""
    if isinstance(error, DsprepError):
        where = str(error.where) if error.where is not None else str(file)
        if str(file) not in where:
            where = f"{file}: {where}"
        expected, actual = (None if v is None else _plain(v) for v in (error.expected, error.found))
        return Problem(where, error.what, expected, actual, field)
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    named = getattr(error, "filename", None)
    return Problem(str(named or file), f"it cannot be read: {text or type(error).__name__}")


def _plain(value: object) -> Any:
    return value if isinstance(value, int | float | str | bool) else str(value)


CAUGHT = (DsprepError, OSError, MemoryError, OverflowError)
"""What damaged data and the system may raise."""
