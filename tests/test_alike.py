"""Samples that lie sorted by their class: who notices, and what is advised."""

from __future__ import annotations

import warnings

import h5py
import numpy as np
import pytest
from support import cli

import dsprep
from dsprep.reader import checks
from dsprep.source.alike import OrderWarning
from dsprep.verbs.provenance import provenance

COUNT = 4000
SORTED = np.repeat(np.arange(10), COUNT // 10)
DRAWN = np.random.default_rng(0)
NOT_SORTED = {
    "shuffled": DRAWN.permutation(SORTED),
    "rare": (DRAWN.random(COUNT) < 0.002).astype(int),
    "constant": np.zeros(COUNT, int),
    "number": np.arange(COUNT),
    "alternating": np.arange(COUNT) % 2,
}


def made(tmp_path, y, name="train.h5"):
    path = tmp_path / name
    with h5py.File(path, "w") as file:
        file["x"] = DRAWN.normal(size=(COUNT, 4)).astype("f4")
        file["y"] = y
    return path


def repack(path, out, *words):
    return cli("repack", path, out, *words)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.setattr(checks, "_looked_at", set())


def said_by_reader(path, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            dsprep.Reader(path, 64, **{"rank": 0, "world_size": 1, **options}).close()
    return [str(w.message) for w in caught if issubclass(w.category, OrderWarning)]


@pytest.mark.parametrize("suffix", [".h5", ".tfrecord"])
def test_sorted_samples_are_noticed_once_and_the_remedy_works(suffix, tmp_path):
    path, out = made(tmp_path, SORTED), tmp_path / f"out{suffix}"
    said = repack(path, out, "-b", 1000).err
    assert said.count("samples are sorted by y") == 1
    (words,) = said_by_reader(out)
    for text in (said, words):
        assert "--shuffle SEED" in text

    def classes(path, **options):
        """The median number of classes in a batch."""
        with dsprep.Reader(path, 64, rank=0, world_size=1, **options) as reader:
            return np.median([len(np.unique(b["y"])) for b in reader])

    assert classes(out) <= 4
    assert classes(out, buffers_mixed=4) >= 9
    mixed = tmp_path / f"mixed{suffix}"
    assert "sorted" not in repack(path, mixed, "-b", 1000, "--shuffle", 1).err
    assert said_by_reader(mixed) == []
    assert classes(mixed) >= 9


@pytest.mark.parametrize("name", NOT_SORTED)
def test_nothing_is_said_of_others(name, tmp_path):
    path, out = made(tmp_path, NOT_SORTED[name]), tmp_path / "out.h5"
    assert "sorted" not in repack(path, out, "-b", 1000).err
    assert said_by_reader(out) == []


def test_it_can_be_turned_off_and_knows_when_it_does_not_matter(tmp_path):
    path, out = made(tmp_path, SORTED), tmp_path / "out.h5"
    repack(path, out, "-b", 1000)
    found = cli("repack", path, tmp_path / "o.h5", "--dry-run", "--json").json()
    assert any("sorted by y" in words for words in found["warnings"])
    quiet = [
        {"buffers_mixed": 2},
        {"shuffle": "global"},
        {"shuffle": "none"},
        {"buffer_size": COUNT},
        {"rank": 1, "world_size": 2},
    ]
    for options in quiet:
        assert said_by_reader(out, **options) == []
    provenance(path)
    assert len(said_by_reader(path, buffer_size=500)) == 1  # without groups, too
