"""Whether a call is the one that was interrupted: what its digest depends on, and what not."""

from __future__ import annotations

import datetime
import decimal
import enum
import functools
import logging
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from dsprep.writing.items.identity import identify

LOGGER = logging.getLogger("items")
LOCK = threading.Lock()
STATE = None
Point = namedtuple("Point", "x y")


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Node:
    """Part of a graph."""

    value: object
    links: list = field(default_factory=list)


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


def circle(value):
    first, second = Node(value), Node(2)
    first.links, second.links = [second, first], [first, second]
    return first


def masked(value):
    return np.ma.masked_array([1.0, 2.0], [False, bool(value - 1)])


def used(item):
    return LOGGER, os.sep, np.zeros(3), re.compile(PATTERN), Color.RED


PATTERN = "a+"

KINDS = {
    "int": lambda v: v,
    "bool": lambda v: [True, 1][v - 1],
    "float": lambda v: [0.0, -0.0][v - 1],
    "str": lambda v: f"\ud800{v}",
    "bytes": lambda v: bytes([0, v]),
    "bytearray": lambda v: bytearray([0, v]),
    "path": lambda v: Path(f"a/{v}"),
    "tuple": lambda v: (1, (2, v)),
    "list in tuple": lambda v: [(1, 2), [1, 2]][v - 1],
    "dict": lambda v: {"a": {"b": v}},
    "set": lambda v: {("a", "b", "c", v)},
    "frozenset": lambda v: frozenset({"a", "b", v}),
    "range": lambda v: range(v),
    "array": lambda v: np.where(np.arange(9999) == 5000, v, 0),
    "dtype": lambda v: np.zeros(2, ["<f4", "<i4"][v - 1]),
    "byte order": lambda v: np.zeros(2, ["<f4", ">f4"][v - 1]),
    "shape": lambda v: np.zeros([(2, 3), (3, 2)][v - 1]),
    "objects": lambda v: np.array([v, None]),
    "structured": lambda v: np.zeros(1, [("a", "<i4"), (f"b{v}", "<i4")]),
    "masked": masked,
    "scalar": lambda v: np.float32(v),
    "kind of scalar": lambda v: [np.float32(1), np.float64(1)][v - 1],
    "matrix": lambda v: np.matrix([[v]]),
    "generator": np.random.default_rng,
    "random": random.Random,
    "datetime": lambda v: datetime.datetime(2020, 1, v, tzinfo=datetime.UTC),
    "decimal": lambda v: decimal.Decimal(v),
    "counter": lambda v: Counter(a=v),
    "defaultdict": lambda v: defaultdict(int, a=v),
    "default of one": lambda v: defaultdict([int, float][v - 1]),
    "ordered": lambda v: OrderedDict(a=v),
    "deque": lambda v: deque([v]),
    "namedtuple": lambda v: Point(1, v),
    "enum": Color,
    "dataclass": Node,
    "cycle": circle,
    "slots": Slotted,
    "pattern": lambda v: re.compile(f"a{v}"),
    "partial": lambda v: functools.partial(max, v),
    "bound method": lambda v: Node(v).__eq__,
    "builtin method": lambda v: [v].append,
    "function": lambda v: [used, circle][v - 1],
    "class": lambda v: [Node, Slotted][v - 1],
    "lambda": lambda v: [lambda: 1, lambda: 2][v - 1],
    "slice": lambda v: slice(v),
}


def digest(value):
    return identify(used, [value]).items


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_told_apart(kind):
    make = KINDS[kind]
    one, again, other = make(1), make(1), make(2)
    found = identify(used, [one])
    assert not found.unknown
    assert found.items == digest(again)
    assert found.items != digest(other)
    assert digest([one, one]) != digest([one, other])


def everything():
    texts = {f"t{i}" for i in range(50)}
    values = [make(1) for make in KINDS.values()] + [texts, {"k": frozenset(texts)}]
    closed = (lambda values: lambda item: (values, used, item in {"a", "b", "c"}))(values)
    found = identify(closed, values)
    return found.items, sorted(found.values.items()), found.code


def test_another_process_has_the_same_digests():
    code = "import test_item_identity as t; print(t.everything())"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    found = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
        )
        found.add(done.stdout)
    assert len(found) == 1


def remember(item):
    global STATE
    STATE = STATE or time.time()
    return STATE, LOCK


def test_what_cannot_be_told_is_named():
    found = identify(remember, [threading.Lock()])
    module = f"{__name__}.remember"
    assert found.unknown == {
        f"global LOCK of {module}": "a lock",
        f"global STATE of {module}": "the function assigns it",
        "items": "a lock",
    }
    assert found.values == identify(remember, [threading.Lock()]).values


class Lazy:
    """A sequence of which the items are made when they are asked for."""

    def __init__(self, count, handle):
        self.count, self.handle = count, handle

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        if number >= self.count:
            raise IndexError
        return (number, self.count)


def test_sequences_are_told_by_their_state_or_by_their_items():
    class Never(Lazy):
        def __getitem__(self, number):
            raise AssertionError

    assert digest_of(Never(3, None)) == digest_of(Never(3, None)) != digest_of(Never(4, None))
    assert digest_of(Lazy(3, iter(LOCKS))) == digest_of(Lazy(3, iter(LOCKS)))


LOCKS = [LOCK]


def digest_of(items):
    return identify(used, items).items


def test_graphs_and_references_to_one_array_take_no_time():
    nodes = [Node(i) for i in range(200)]
    for node in nodes:
        node.links = nodes
    array = np.zeros(4_000_000)
    began = time.monotonic()
    identify(used, [nodes, *((array, i) for i in range(1000))])
    assert time.monotonic() - began < 5


def test_a_hundred_thousand_items_take_no_time():
    lists = [
        [f"file-{i}" for i in range(100_000)],
        [(f"file-{i}", i) for i in range(100_000)],
        [(Path(f"file-{i}"), i, 0.5) for i in range(100_000)],
        list(np.arange(100_000)),
    ]
    for items in lists:
        began = time.monotonic()
        identify(used, items)
        assert time.monotonic() - began < 2


def test_code_is_apart_from_values():
    def made(text):
        own = {"__name__": "own", "UNIT": 1}
        exec(text, own)
        return identify(own["load"], [1])

    one = made("def load(i):\n    return UNIT * i")
    same = made("# a comment\n\ndef load(i): return UNIT * i")
    edited = made("import math\ndef load(i): return UNIT * math.floor(i)")
    helped = made("def load(i): return inner(i)\ndef inner(i): return i")
    other = made("def load(i): return inner(i)\ndef inner(i): return 2 * i")
    assert one.code == same.code != edited.code
    assert edited.differing(one.values) == []
    assert helped.code != other.code
    assert helped.differing(other.values) == []
