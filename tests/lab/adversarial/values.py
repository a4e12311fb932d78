"""Samples of odd values given to `dsprep.write`, in every way and format.

Each value is read back bit for bit, by dsprep and by the format's own library, or refused in one
line that names its field. What a value is, is said here from the value itself, without numpy's
promotions: a list is its leaves, a number of Python is that number.
"""

from __future__ import annotations

import argparse
import array
import collections
import datetime
import decimal
import enum
import fractions
import struct
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from oracles import READ, SUFFIX
from support import raw

import dsprep
from dsprep.errors import DsprepError
from dsprep.storage.trees import remove
from lab.adversarial import judging
from lab.adversarial.judging import Tally

COUNT = 3
FORMS = ("length", "iterator", "batch", "function", "later")
Generator = np.random.Generator


# --- values ------------------------------------------------------------------------------------


class Offers:
    """What numpy can make an array of, such as a tensor."""

    def __init__(self, values: np.ndarray, **facts: Any) -> None:
        self.values = values
        vars(self).update(facts)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.values


class Refuses:
    """What says that it can be an array, and cannot."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise RuntimeError("it is on another device")


class Own(np.ndarray):
    """An array of a class of its own."""


class Whole(int):
    """A number of a class of its own."""


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    ONE = "one"


@dataclass
class Record:
    x: int
    y: float


Point = collections.namedtuple("Point", "x y")
INTS = (0, 1, -1, 255, 2**24 + 1, 2**31, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), 2**63, 2**64 - 1)
HUGE = (2**64, -(2**63) - 1, 2**70, -(10**40))
FLOATS = (0.0, -0.0, 0.1, 1e308, 5e-324, float("inf"), -float("inf"), 2.0**53, -1.5)
PAYLOADS = (0x7FF8000000000001, 0xFFF8DEADBEEF0001, 0x7FF0000000000001)
DTYPES = (*"?bBhHiIqQefdFD", ">i2", ">u8", ">f4", ">f8", ">c8", "M8[D]", ">M8[ns]", "m8[us]")
STRUCTS = (
    np.dtype([("a", "u1"), ("b", "<f8")], align=True),
    np.dtype([("a", ">i2"), ("b", "<f4", (2, 2)), ("c", [("d", "?")])]),
    np.dtype({"names": ["z", "a"], "formats": ["<i4", "S3"], "offsets": [8, 1], "itemsize": 20}),
)


def pick(rng: Generator, values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def number(rng: Generator) -> Any:
    kinds = (
        lambda: pick(rng, INTS),
        lambda: pick(rng, HUGE) if rng.random() < 0.3 else int(rng.integers(-9, 9)),
        lambda: pick(rng, FLOATS),
        lambda: struct.unpack("<d", struct.pack("<Q", pick(rng, PAYLOADS)))[0],
        lambda: bool(rng.integers(2)),
        lambda: complex(pick(rng, FLOATS), pick(rng, FLOATS)),
    )
    return pick(rng, kinds)()


def numbers(rng: Generator, kinds: int = 3) -> list[Any]:
    """Numbers of Python, of up to so many sorts."""
    some = [number(rng) for _ in range(kinds)]
    return [pick(rng, some) for _ in range(int(rng.integers(1, 6)))]


def plain(rng: Generator, dtype: Any = None, shape: Any = None) -> np.ndarray:
    """An array of random bits."""
    dtype = np.dtype(pick(rng, DTYPES) if dtype is None else dtype)
    shape = (
        tuple(int(n) for n in rng.integers(1, 4, int(rng.integers(3)))) if shape is None else shape
    )
    if dtype.names:
        made = np.zeros(shape, dtype)
        for name in dtype.names:
            made[name] = plain(rng, made[name].dtype, made[name].shape)
        return made
    bits = rng.bytes(int(np.prod(shape, dtype=int)) * dtype.itemsize)
    if dtype.kind == "b":
        bits = bytes(b & 1 for b in bits)
    return np.frombuffer(bits, dtype).reshape(shape).copy()


def rows(rng: Generator) -> list[Any]:
    """Rows that have a type: mostly one, sometimes several."""
    dtypes = [pick(rng, DTYPES)] if rng.random() < 0.5 else [pick(rng, DTYPES) for _ in range(2)]
    shape = () if rng.random() < 0.4 else (2,)
    made = [plain(rng, pick(rng, dtypes), shape) for _ in range(int(rng.integers(1, 4)))]
    return [m[()] for m in made] if rng.random() < 0.5 else made


def strided(rng: Generator) -> np.ndarray:
    values = plain(rng, shape=(4, 6))
    ways = (
        lambda: np.asfortranarray(values),
        lambda: values[::2, ::-3],
        lambda: values.T,
        lambda: np.broadcast_to(values[0], (3, 6)),
        lambda: np.frombuffer(b"\0" + values.tobytes(), values.dtype, offset=1)[1:],
    )
    return pick(rng, ways)()


def masked(rng: Generator) -> Any:
    values = np.ma.masked_array(plain(rng, "d", (3,)), [0, rng.random() < 0.7, 0])
    return pick(rng, (values, [values, values], [1.0, np.ma.masked], (values[:1],), values[0]))


def texts(rng: Generator) -> Any:
    some = (
        "",
        "a\0b",
        "end\0",
        "é",
        "\U0001f600",
        "\ud800",
        "\udc80",
        "\udcff",
        "\ufeff",
        "a" * 5000,
    )
    return pick(rng, (str, np.str_))(pick(rng, some))


def raws(rng: Generator) -> Any:
    data = pick(rng, (b"", b"\0", b"a\0", b"\0\0a\0\0", rng.bytes(int(rng.integers(5000)))))
    return pick(rng, (bytes, bytearray, memoryview, lambda d: memoryview(d)[::-2]))(data)


def foreign(rng: Generator) -> Any:
    values = plain(rng, shape=(2, 3))
    same, mixed = ["int64"] * 3, ["int64", "float64", "float64"]
    made = (
        Offers(values),
        Offers(values, shape=values.shape, dtypes=same),
        Offers(values, shape=values.shape, dtypes=mixed),
        Offers(values, null_count=0),
        Offers(values, null_count=1),
        Offers(np.array([None, 1])),
        Refuses(),
    )
    return pick(rng, made)


def subclassed(rng: Generator) -> Any:
    values = plain(rng, shape=(2, 2))
    made = (
        values.view(Own),
        np.matrix([[1, 2]]) if rng.random() < 0.5 else values.view(Own)[0],
        plain(rng, STRUCTS[1], (2,)).view(np.recarray),
        [values.view(Own), values.view(Own)],
        Whole(3),
        [Whole(3), 4],
        Level.LOW,
        Word.ONE,
    )
    return pick(rng, made)


def nested(rng: Generator) -> Any:
    return pick(
        rng,
        (
            [numbers(rng), numbers(rng)],
            [[], []],
            [],
            [[1, 2], (3, 4)],
            [[1], [2, 3]],
            [1, [2]],
            [np.zeros((0, 3), "f4")],
            [[plain(rng, "f", (2,))], [plain(rng, "f", (2,))]],
            [[[[pick(rng, INTS)]]]],
        ),
    )


def odd_dtypes(rng: Generator) -> Any:
    return pick(
        rng,
        (
            plain(rng, ml_dtypes.bfloat16, (3,)),
            plain(rng, ml_dtypes.float8_e4m3fn, (2,)),
            np.arange(3, dtype=np.longdouble),
            np.array([b"a\0", b"bc"]),
            np.array(["é", "a\0"]),
            np.array(b"", "S"),
            np.zeros(3, "V5"),
            np.void(b"ab\0"),
            np.array(["a", "b"], np.dtypes.StringDType()),
            np.array([object(), None]),
            np.array([{}, []], object),
            np.array(3, object),
            np.zeros((0, 3)),
            np.zeros((2, 0), "i4"),
            np.datetime64("NaT"),
            np.timedelta64(5),
            np.array(7),
        ),
    )


def no_values(rng: Generator) -> Any:
    return pick(
        rng,
        (
            None,
            {1, 2},
            frozenset(),
            {"a": 1},
            collections.Counter("ab"),
            Record(1, 2.0),
            object(),
            (i for i in range(3)),
            iter([1, 2]),
            map(int, "12"),
            array.array("d", [1.0]),
            collections.deque([1]),
            datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC),
            datetime.date(2020, 1, 1),
            [datetime.datetime(2020, 1, 1)],
            decimal.Decimal("0.1"),
            [decimal.Decimal("0.1"), 1.0],
            fractions.Fraction(1, 3),
            [fractions.Fraction(1, 3), 1],
            range(3),
            slice(3),
            int,
            len,
            ...,
            NotImplemented,
            [None, 1.0],
            [{"a": 1}],
            ["a", "b"],
            ["a", 1],
            [b"a", "b"],
            [b"a\0", b"b"],
            Path("a"),
        ),
    )


KINDS: dict[str, Callable[[Generator], Any]] = {
    "number": number,
    "list of numbers": numbers,
    "tuple of numbers": lambda rng: tuple(numbers(rng)),
    "bool and int": lambda rng: [True, int(rng.integers(-3, 3)), False],
    "big ints": lambda rng: [pick(rng, INTS + HUGE) for _ in range(2)],
    "nested": nested,
    "rows with types": rows,
    "rows and numbers": lambda rng: [*rows(rng), number(rng)],
    "masked": masked,
    "array": plain,
    "scalar": lambda rng: plain(rng, shape=())[()],
    "strided": strided,
    "structured": lambda rng: plain(rng, pick(rng, STRUCTS), pick(rng, ((), (2,)))),
    "structured rows": lambda rng: [plain(rng, pick(rng, STRUCTS[:2]), ())[()] for _ in range(2)],
    "odd dtype": odd_dtypes,
    "str": texts,
    "bytes": raws,
    "view of numbers": lambda rng: memoryview(plain(rng, pick(rng, "bhiqfd?"), (2, 3))),
    "namedtuple": lambda rng: Point(*(number(rng) for _ in range(2))),
    "subclass": subclassed,
    "offers an array": foreign,
    "no value": no_values,
}


# --- what was read -------------------------------------------------------------------------------


def differs(value: Any, found: Any) -> str:
    """Return how what was read is not the value that was given; empty if it is."""
    if isinstance(value, np.ma.MaskedArray):
        return (
            "a mask was dropped" if np.ma.getmaskarray(value).any() else differs(value.data, found)
        )
    if isinstance(value, str):
        return "" if isinstance(found, str) and list(found) == list(value) else "other text"
    if isinstance(value, bytes | bytearray):
        return "" if isinstance(found, bytes) and found == bytes(value) else "other bytes"
    if isinstance(value, memoryview) and value.format == "B" and value.ndim == 1:
        return differs(bytes(value), found)
    if isinstance(value, list | tuple):
        if not isinstance(found, np.ndarray) or len(found) != len(value):
            return "another length"
        return next(filter(None, map(differs, value, found)), "")
    if isinstance(value, bool | int | float | complex) and not isinstance(value, np.generic):
        return number_differs(value, found)
    if getattr(value, "null_count", 0) or len(set(getattr(value, "dtypes", ()))) > 1:
        return "nulls or columns' types were dropped"
    given, found = np.asarray(value), np.asarray(found)
    if given.dtype != found.dtype and given.dtype.newbyteorder("=") != found.dtype:
        return f"{given.dtype} became {found.dtype}"
    found = found.astype(given.dtype) if given.dtype != found.dtype else found
    if given.shape != found.shape:
        return f"shape {given.shape} became {found.shape}"
    return "" if raw(given) == raw(found) else "other bits"


def number_differs(value: Any, found: Any) -> str:
    """Compare a number of Python; as floats bit for bit."""
    one = found.item() if isinstance(found, np.generic | np.ndarray) else found
    if isinstance(value, float) and isinstance(one, float):
        same = struct.pack("<d", value) == struct.pack("<d", one)
    elif isinstance(value, complex) and isinstance(one, complex):
        same = struct.pack("<2d", value.real, value.imag) == struct.pack("<2d", one.real, one.imag)
    else:
        same = one == value or (one != one and value != value)
    return "" if same else f"{value!r} became {one!r}"


# --- trials --------------------------------------------------------------------------------------


def write(target: Path, form: str, value: Any, to: str) -> None:
    samples = [{"n": i, "x": value} for i in range(COUNT)]
    given: dict[str, Any] = {"to": to, "durable": False}
    if form == "length":
        dsprep.write(target, samples, **given)
    elif form == "batch":
        batch = {"n": list(range(COUNT)), "x": [value] * COUNT}
        dsprep.write(target, [batch], batched=True, **given)
    elif form == "function":
        dsprep.write(target, range(COUNT), function=lambda i: samples[i], workers=1, **given)
    else:
        dsprep.write(target, iter(samples), **given)


def later(target: Path, value: Any, rng: Generator, to: str) -> Any:
    """Write a value after another one of its kind, which has the fields; return that."""
    first = pick(rng, (1, 1.5, np.float32(1), [1, 2], [1.5], np.zeros(2), [np.int16(3)], True, 1j))
    given = [{"n": 0, "x": first}, {"n": 1, "x": value}, {"n": 2, "x": value}]
    dsprep.write(target, given, to=to, durable=False)
    return first


def trial(number: int, kind: str, rng: Generator, target: Path, to: str) -> str:
    value, form = KINDS[kind](rng), FORMS[number % len(FORMS)]
    shown = f"{form}, {to}: {value!r:.300}"
    first = value
    try:
        if form == "later":
            first = later(target, value, rng, to)
        else:
            write(target, form, value, to)
    except (DsprepError, OSError) as error:
        text = str(error)
        if len(text.splitlines()) != 1 or "field x" not in text or len(text) > 600:
            return f"!unclear refusal | {shown}\n{text[:900]}"
        left = [p.name for p in target.parent.iterdir() if form != "function"]
        return f"!refused, but {left} is left | {shown}" if left else "refused"
    except Exception as error:
        return f"!{type(error).__name__} | {shown}\n{error!s:.600}"
    try:
        with dsprep.open(target) as source:
            batch, schema = source[:], source.schema
            found = [source[i]["x"] for i in range(COUNT)]
        if judging.values(batch) != judging.values(READ[to](target, schema)):
            return f"!the library reads it otherwise | {shown}"
    except Exception as error:
        return f"!written, and not read | {shown}\n{error!s:.600}"
    for given, one in zip((first, value, value), found, strict=True):
        if what := differs(given, one):
            return f"!{what} | {shown}\n{schema}: {one!r:.300}"
    return "read back"


def trials(numbers: Iterator[int], tally: Tally, folder: Path, options: argparse.Namespace) -> None:
    formats = sorted(SUFFIX)
    for number in numbers:
        rng = np.random.default_rng([options.seed, number])
        kind, to = pick(rng, list(KINDS)), formats[number % len(formats)]
        if options.kind and kind not in options.kind:
            continue
        own = folder / "own"
        own.mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            what = trial(number, kind, rng, own / f"set{SUFFIX[to]}", to)
        tally.judge(number, kind, what)
        remove(own)
