"""The rules by which threads and buffers are chosen: cores, ranks, what was asked for, decoding."""

from __future__ import annotations

import os

import pytest

from dsprep.reader import defaults
from dsprep.reader.defaults import buffers_by_rule, share, threads_by_rule
from dsprep.reader.ranks import RankInfo


def place(world=1, local=1):
    return RankInfo(0, world, 0 if local else None, local, "a test")


@pytest.mark.parametrize(
    ("cores", "of_node", "world", "local", "reading", "decoding"),
    [
        (1, 1, 1, 1, 1, 1),
        (2, 2, 1, 1, 2, 2),
        (64, 64, 1, 1, 4, 64),
        (64, 64, 16, 4, 4, 16),  # not bound: all of them use all cores
        (64, 64, 64, 64, 1, 1),
        (2, 2, 8, 8, 1, 1),  # at least one
        (7, 7, 2, 2, 3, 3),
        (16, 64, 16, 4, 4, 16),  # bound to 16 cores each
        (16, 16, 16, 4, 4, 4),  # the job has 16 of the node's cores, and shares them
        (1, 64, 64, 64, 1, 1),
        (8, 64, 16, None, 1, 1),  # how many are on the node is unknown: all may be
        (8, 64, 2, None, 4, 4),
    ],
)
def test_threads(cores, of_node, world, local, reading, decoding):
    found = share(cores, of_node, place(world, local))
    assert threads_by_rule(found) == reading
    assert threads_by_rule(found, decoded=True) == decoding


def test_cores_of_the_job(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    for told, count in (("16", 16), ("128", 64), ("0", 64), ("", 64), ("-4", 64), ("9" * 99, 64)):
        assert defaults.node_cores({"SLURM_CPUS_ON_NODE": told}) == count
    assert defaults.node_cores({}) == 64
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert defaults.node_cores({}) == 1


@pytest.mark.parametrize(
    ("unit", "threads", "found"), [(8, 1, 2), (8, 2, 3), (8, 4, 4), (40, 4, 2)]
)
def test_each_thread_has_a_small_unit(unit, threads, found):
    assert buffers_by_rule(unit << 20, threads) == found
    assert buffers_by_rule(0, threads) == threads + 1
