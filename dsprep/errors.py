"""The errors that dsprep raises, and the one line each of them prints.

::

    DsprepError
     ├── UsageError        (ValueError)       options or arguments that contradict each other
     ├── FormatError       (ValueError)       a file is damaged, or is not of the expected format
     │    └── ChangedError                    data changed while they were read
     ├── SchemaError       (ValueError)       fields are missing, or files disagree about them
     │    └── AmbiguousError                  a file can be read in several ways
     ├── UnsupportedError  (TypeError)        a target cannot hold the data
     ├── NotFoundError     (OSError)          nothing has the name of a dataset
     ├── ReadError         (OSError)          samples cannot be read while training goes on
     ├── ExecutorError     (RuntimeError)     processes that work together were lost
     ├── ItemError         (RuntimeError)     a function of the user failed for an item
     ├── TargetError       (OSError)          the target exists, is locked, or lacks space
     └── MissingExtra      (ImportError)      an optional package is needed

Every class also derives from the built-in that a caller would catch anyway. A message says what
is wrong, where, what was expected, what was found and what to do; the parts are attributes. They
name options as the command line does; as text, an error names the arguments of Python's functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

_OPTION = re.compile(
    r"dsprep [a-z]+ [^;]*|--(?P<switch>overwrite|restart)(?![\w-])|--(?P<name>buffer-size|cast|"
    r"chunk|compress|duplicate|group-by|memory|samples|shard-size|shuffle|split|"
    r"stripe-size|subset|to|workers)(?![\w-])"
    r"(?: (?P<value>[0-9][\w.:]*\w|[0-9]|'[^']*'|(?:hdf5|lmdb|tfrecord|zarr|gzip|zstd)\b[\w:]*))?"
)
"""A whole command, or an option that is an argument of the same name in Python, and its value."""


class DsprepError(Exception):
    """A problem that the user can understand and fix; the command line prints it as one line.

    Parameters
    ----------
    what
        What is wrong, as a clause without a final stop.
    where
        The file, and if known the offset, record and field, from the largest to the smallest.
    expected, found
        The two things that disagree.
    fix
        What to do about it, as an imperative clause.
    """

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        expected: object = None,
        found: object = None,
        fix: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found
        self.fix = fix
        text = what if where is None else f"{where}: {what}"
        facts = [
            f"{word} {value}"
            for word, value in (("expected", expected), ("found", found))
            if value is not None
        ]
        if facts:
            text += f" ({', '.join(facts)})"
        if fix:
            text += f"; {fix}"
        super().__init__(text)

    def __str__(self) -> str:
        return _OPTION.sub(_argument, str(self.args[0]))

    def with_fix(self, fix: str) -> DsprepError:
        """Return the error with one thing more to do about it, if `fix` is not empty."""
        fix = "; ".join(filter(None, (self.fix, fix)))
        facts = {"where": self.where, "expected": self.expected, "found": self.found}
        return type(self)(self.what, **facts, fix=fix or None)

    def __reduce__(self) -> tuple[Any, ...]:
        # It is restored as it was raised, not made again from a text that has all facts.
        return _remade, (type(self), self.args, vars(self))


def _argument(option: re.Match[str]) -> str:
    """Return how functions of Python call an option that was found in a text."""
    if option["switch"]:
        return f"{option['switch']}=True"
    value = option["value"] or ""
    value = repr(value) if value[:1].isalnum() and not value.isdecimal() else value
    return f"{option['name'].replace('-', '_')}={value}" if option["name"] else option[0]


def _remade(kind: type[DsprepError], args: tuple[Any, ...], facts: dict[str, Any]) -> DsprepError:
    error = kind.__new__(kind, *args)
    error.args = args  # which those of the system set by themselves when they are initialised
    error.__dict__.update(facts)
    return error


def describe(error: BaseException) -> str:
    """Return the kind of an error that others raised, and what it says, if that can be had."""
    kind = type(error).__name__
    try:
        return f"{kind}: {error}"
    except Exception as failed:
        return f"{kind}, whose text fails: {type(failed).__name__}"


class UsageError(DsprepError, ValueError):
    """Options or arguments are wrong or contradict each other."""

    exit_code = 2


class FormatError(DsprepError, ValueError):
    """A file is damaged, or is not of the expected format."""


class ChangedError(FormatError):
    """Data changed while they were read."""


class NotFoundError(DsprepError, FileNotFoundError):
    """Nothing has the name of a dataset."""


class ReadError(DsprepError, OSError):
    """Samples cannot be read; the cause is what the system or the format said.

    Attributes
    ----------
    sample
        The first sample that is concerned.
    """

    def __init__(self, what: str, sample: int, **facts: object) -> None:
        super().__init__(what, **facts)  # type: ignore[arg-type]
        self.sample = sample


class SchemaError(DsprepError, ValueError):
    """A field is missing, or several files disagree about their fields."""


class AmbiguousError(SchemaError):
    """A file can be read in several ways, and nothing says which.

    Parameters
    ----------
    reason
        Why, as a clause.
    readings
        Each option that chooses a way, and what it gives.
    where, fix
        As of `DsprepError`; `fix` is what helps where none of them does.
    """

    def __init__(
        self,
        reason: str,
        readings: Sequence[tuple[str, str]],
        *,
        where: object = None,
        fix: str | None = None,
    ) -> None:
        self.reason, self.readings = reason, tuple(readings)
        ways = "; ".join(f"{option}: {gives}" for option, gives in readings)
        super().__init__(
            f"what its samples are is doubtful: {reason}",
            where=where,
            fix=f"say which: {ways}; or {fix}",
        )
        self.fix = fix


class UnsupportedError(DsprepError, TypeError):
    """The target format cannot hold the data; the message names the nearest thing it can."""


class ItemError(DsprepError, RuntimeError):
    """A function of the user failed for an item; the cause is what it raised."""


class TargetError(DsprepError, OSError):
    """The output exists already, is being written by someone else, or does not fit."""


class ExecutorError(DsprepError, RuntimeError):
    """Processes that did parts of the work were lost, or cannot be reached."""


class MissingExtra(DsprepError, ImportError):
    """An optional package is needed for this; the message names it."""


def require(condition: object, error: type[DsprepError], what: str, **facts: Any) -> None:
    """Raise an error unless a condition holds.

    Parameters
    ----------
    condition
        The state that is expected.
    error
        The class of the error.
    what, facts
        The message and its parts, as of `DsprepError`. They are evaluated in any case: a message
        that is costly, or that exists only where the condition fails, needs an ``if``.
    """
    if not condition:
        raise error(what, **facts)


class DsprepWarning(UserWarning):
    """Work goes on, and something about it is worth knowing; the command line prints a note."""


class LocatedWarning(DsprepWarning):
    """Data had no sidecar, and were located when they were opened."""


def layout_mismatch(
    subject: str, where: object, expected: object = None, found: object = None
) -> FormatError:
    """Return the error for a layout that does not fit its file, regardless of what gave it."""
    return FormatError(
        f"the layout {subject}",
        where=where,
        expected=expected,
        found=found,
        fix="the data were damaged or changed since their layout was found; where a sidecar gives "
        "it, write that again with dsprep provenance",
    )


def changed(where: object, how: str) -> ChangedError:
    """Return the error for data that are no longer those that were opened, in one clause."""
    return ChangedError(
        f"the data changed while they were read: {how}",
        where=where,
        fix="start again once nobody writes to them",
    )


def near(name: str, names: Iterable[str]) -> str | None:
    """Return a proposal of the names that are nearly `name`, or None."""
    from difflib import get_close_matches  # slow to import, and seldom needed

    names = list(names)
    similar = [n for n in names if len(name) > 3 and n.startswith(name)]
    similar += [n for n in get_close_matches(name, names, 2, 0.7) if n not in similar]
    return f"did you mean {' or '.join(similar[:2])}?" if similar else None
