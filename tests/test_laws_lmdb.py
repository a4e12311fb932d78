"""The laws of LMDB give the place of every record, or say that they do not.

The truth is what py-lmdb wrote, found by the walk of its pages and read back by py-lmdb.
"""

from __future__ import annotations

import itertools
import json
import random

import numpy as np
import pytest
from lmdb_builds import KEYS, build, read_back, value, walk
from support import fails

from dsprep.core.packing import Tables
from dsprep.errors import FormatError
from dsprep.formats.lmdb.recover import recover
from dsprep.layout import laws
from dsprep.layout.laws import Affine, Table
from dsprep.layout.laws.lmdb import Shape
from dsprep.layout.laws.replay import MAX_STEPS, Replay
from dsprep.layout.laws.tree import Tree


def through_json(law, lengths):
    """The law as a sidecar gives it back."""
    tables = Tables()
    text = json.dumps(law.to_json(tables))
    return laws.parse(json.loads(text), law.count, Tables(bytes(tables.written)), lengths)


def assert_exact(law, found):
    n = len(found.offsets)
    sizes = found.sizes
    lengths = Affine(n, int(sizes[0])) if n and (sizes == sizes[0]).all() else Table(sizes)
    back = through_json(law, lengths)
    assert back.to_json(Tables()) == law.to_json(Tables())
    for each in (law, back):
        assert np.array_equal(each.span(0, n), found.offsets)
        some = np.random.default_rng(n).integers(0, max(n, 1), min(n, 1000))
        assert np.array_equal(each.at(some), found.offsets[some])
    assert len(law.words().splitlines()) == 1


def assert_recovered(path, n, commit, append, named, compact):
    """That the file is explained, exactly, and by what it was made with."""
    found = walk(path, named)
    assert len(found.offsets) == n
    given_back, facts = recover(*found)
    assert given_back, f"no law for commit={commit}, append={append}, named={named}"
    for law in given_back:
        assert_exact(law, found)
    one = commit is None or commit >= n
    assert facts["database"] == ("named" if named else "main")
    assert facts.get("append", append) == append
    assert facts.get("copied compactly", compact) == compact
    if compact:
        assert isinstance(given_back[0], Tree)
    else:
        assert facts.get("commit interval") in ("one transaction" if one else commit, None)
    assert facts["order"] == "ascending keys"
    assert json.loads(json.dumps(facts)) == facts
    return found


# --- py-lmdb -----------------------------------------------------------------------------------

QUICK = {8: 3000, 100: 1500, 784: 500, 2022: 400, 2023: 700, 3072: 1000, 4081: 400, 12288: 400}


@pytest.mark.parametrize(
    ("commit", "append"),
    [(None, True), (None, False), (1000, True), (100, True), (100, False), (10, False), (1, True)],
)
@pytest.mark.parametrize("size", QUICK)
def test_matrix(tmp_path, size, commit, append):
    n = QUICK[size] if commit != 1 else QUICK[size] // 2
    for named in (False, True):
        path = build(tmp_path / "a", n, size, commit=commit, append=append, named=named)
        found = assert_recovered(path, n, commit, append, named, compact=False)
        assert not read_back(path, found.offsets, named)


MANY_SIZES = np.random.default_rng(3).integers(2100, 30000, 700)
BUILDS = {
    "be4": [(900, 784, {"key": "be4"})],
    "dec9": [(900, size, {"key": "dec9"}) for size in (8, 3072)],
    "dec255": [(900, 784, {"key": "dec255"})],
    "dec500": [(500, size, {"key": "dec500"}) for size in (8, 3072)],
    "few": [(n, size, {}) for n in (1, 2, 155, 156, 311, 312) for size in (8, 3072)],
    "sizes": [(700, MANY_SIZES, {})],
    "together": [(900, size, {"together": True}) for size in (8, 784, 3072, 12288)],
    "large": [(12, 1 << 20, {}), (4, 8 << 20, {})],
}


@pytest.mark.parametrize("append", [True, False])
@pytest.mark.parametrize("kind", BUILDS)
def test_builds(tmp_path, kind, append):
    """Keys of any length, values of any, compact copies and named databases."""
    commits = {"few": (None, 1, 100), "large": (None, 3)}.get(kind, (None, 100, 7))
    for n, size, more in BUILDS[kind]:
        for commit, compact in itertools.product(commits, (False, True)):
            if compact and kind in ("together", "large"):
                continue
            own = kind == "together" or (kind != "few" and commit is None)
            for named in (False, True) if kind == "sizes" else (own,):
                made = {"commit": commit, "append": append, "named": named, "compact": compact}
                path = build(tmp_path / "a", n, size, **made, **more)
                found = assert_recovered(path, n, **made)
                assert not read_back(path, found.offsets, named)


@pytest.mark.parametrize("size", [784, 3072, 12288])
def test_a_last_record_put_after_all_others(tmp_path, size):
    def add(transaction):
        transaction.put(b"\xff" * 8, value(9, size), append=True)

    path = build(tmp_path / "a", 950, size, commit=100, then=add)
    found = walk(path)
    given_back, facts = recover(*found)
    assert_exact(given_back[0], found)
    assert facts.get("commit interval", 100) == 100


# --- databases that were not built in order ----------------------------------------------------


def assert_never_wrong(path):
    found = walk(path)
    given_back, facts = recover(*found)
    for law in given_back:
        assert_exact(law, found)
    assert bool(facts) == bool(given_back)
    runs = laws.fit(found.offsets, given_back)
    assert np.array_equal(runs.span(0, len(found.offsets)), found.offsets)
    assert not read_back(path, found.offsets)
    return given_back


@pytest.mark.parametrize("size", [8, 784, 3072, 12288])
@pytest.mark.parametrize("commit", [None, 100])
def test_random_order_deletes_and_overwrites(tmp_path, size, commit):
    n = 800
    order = np.random.default_rng(size).permutation(n)
    path = tmp_path / "a"
    build(path, n, size, commit=commit, append=False, order=order)
    assert assert_never_wrong(path) == ()
    build(path, n, size, commit=commit, append=False, order=order, compact=True)
    assert_never_wrong(path)

    def delete(transaction):
        for i in range(0, n, 9):
            transaction.delete(KEYS["be8"](i))

    def overwrite(transaction):
        for i in range(0, n, 9):
            transaction.put(KEYS["be8"](i), value(i + n, size + i % 2))

    for then in (delete, overwrite):
        build(path, n, size, commit=commit, then=then)
        assert assert_never_wrong(path) == ()


def test_irregular_commits_are_never_guessed(tmp_path):
    rng = random.Random(5)
    for size in (8, 784, 3072, 12288):
        plan = []
        while sum(plan) < 1200:
            plan.append(rng.randint(20, 150))
        build(tmp_path / "a", sum(plan), size, commit=plan)
        assert_never_wrong(tmp_path / "a")
        found = walk(tmp_path / "a")
        law = Replay(
            Shape(4096, 8, size, True, False),
            Affine(sum(plan), size),
            tuple((1, records) for records in plan),
        )
        assert_exact(law, found)


def test_a_reader_that_was_open_is_never_guessed(tmp_path):
    import lmdb

    path = tmp_path / "a"
    with lmdb.open(str(path), subdir=False, map_size=1 << 30, sync=False) as env:
        reader = None
        for t in range(60):
            if t == 5:
                reader = env.begin()
            with env.begin(write=True) as transaction:
                for i in range(t * 20, t * 20 + 20):
                    transaction.put(KEYS["be8"](i), value(i, 3072), append=True)
        reader.abort()
    assert assert_never_wrong(path) == ()


# --- sidecars that are damaged or made to harm ---------------------------------------------------

TREE = {"law": "tree", "kind": "one", "psize": 4096, "key": 8, "append": True, "named": False}
REPLAY = {**TREE, "law": "replay", "commit": 10}


@pytest.mark.parametrize(
    "change",
    [
        {"psize": 4095},
        {"psize": "4096"},
        {"key": 0},
        {"key": True},
        {"psize": 512, "key": 400},
        {"append": 1},
        {"named": "no"},
        {"law": "tree", "kind": "two"},
        {"law": "tree", "moved": 7},
        {"law": "tree", "moved": [[5, 1], [5, 2]]},
        {"law": "tree", "moved": [[1, 1 << 40]]},
        {"law": "tree", "moved": [[i, 1] for i in range(1000)]},
        {"law": "replay", "commit": 0},
        {"law": "replay", "commit": "10"},
        {"law": "replay", "commit": [[1, 999]]},
        {"law": "replay", "commit": [[-1, 10], [101, 10]]},
        {"law": "replay", "commit": [[1 << 200, 1000]]},
        {"law": "replay", "together": True},
        {"law": "replay", "named": True, "together": 1},
        {"law": "tree", "moved": [[1000, 1]]},
    ],
)
def test_hostile_parameters(change):
    for base in (TREE, REPLAY):
        if change.get("law", base["law"]) == base["law"]:
            with pytest.raises(FormatError):
                laws.parse({**base, **change}, 1000, Tables(), Affine(1000, 3072))


@pytest.mark.parametrize("base", [TREE, REPLAY], ids=["tree", "replay"])
def test_hostile_lengths_and_counts(base):
    cases = [
        (1000, None),
        (1000, Affine(999, 3072)),
        (1000, Affine(1000, -1)),
        (1000, Affine(1000, 1 << 32)),
        (1000, Affine(1000, 100, 1)),
        (1000, Affine(1000, 3072, -10)),
        (1000, Table(np.arange(1000))),
        (1 << 58, Affine(1 << 58, 3072)),
        (1 << 30, Affine(1 << 30, 3072, 1)),
    ]
    for count, lengths in cases:
        fails(lambda: laws.parse(base, count, Tables(), lengths), FormatError)


def test_a_replay_without_end_is_refused():
    count = 10 * MAX_STEPS
    with pytest.raises(FormatError, match="too long"):
        laws.parse({**REPLAY, "commit": 1}, count, Tables(), Affine(count, 3072))


def test_nothing_is_a_law_too():
    for base in (TREE, {**TREE, "kind": "compact"}, REPLAY):
        law = laws.parse(base, 0, Tables(), Affine(0, 0))
        assert not len(law.span(0, 0))
        assert law.words()
        assert law.to_json(Tables())["psize"] == 4096
    none = np.zeros(0, np.int64)
    assert recover(4096, none, none, (1, 0), 0, False) == ((), {})
