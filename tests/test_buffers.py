"""The size of groups follows from what is asked, the stripe, the memory and the ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import fails

from dsprep.core.schema import Field, Schema
from dsprep.errors import UsageError
from dsprep.writing.buffers import (
    choose_groups,
    edges_by_bytes,
    group_warnings,
    parse_buffer,
    shrink_groups,
)
from dsprep.writing.stripes import Stripe

MIB = 1 << 20
GIB = 1 << 30


def stripe(nbytes=MIB):
    return Stripe(nbytes=nbytes, source="test", file_system="lustre")


def test_parsing():
    assert parse_buffer("128") == (128, None)
    assert parse_buffer("256MiB") == (None, 256 * MIB)
    assert parse_buffer("100B") == (None, 100)
    assert parse_buffer(" AUTO ") == (None, None)
    for text in ("", "0", "-1", "1.5", "many", "0MiB", "1XB", "9" * 30, "²"):
        fails(lambda: parse_buffer(text), UsageError)


# (samples, bytes of each, asked, stripe, memory, ranks) -> samples per group
CASES = [
    # as asked
    ((1000, 50, "128", MIB, GIB, 1), 128),
    ((100, 50, "128", MIB, GIB, 1), 100),
    # 13,981 fit: 72 groups, of nearly equal size
    ((10**6, 19200, "256MiB", MIB, GIB, 1), 13_889),
    ((9, 10, "40B", MIB, GIB, 1), 3),
    ((10, 10, "40B", MIB, GIB, 1), 4),
    ((1000, 50 * MIB, "1MiB", MIB, GIB, 1), 1),
    ((0, 50, "128", MIB, GIB, 1), 1),
    ((10, 0, "1MiB", MIB, GIB, 1), 10),
    # automatic: 256 MiB
    ((10**6, 19200, "auto", MIB, 64 * GIB, 1), 13_889),
    # 64 stripes of 16 MiB are more
    ((10**6, MIB, "auto", 16 * MIB, 64 * GIB, 1), 1024),
    # a sixteenth of the memory is less
    ((10**6, MIB, "auto", MIB, GIB, 1), 64),
    # four groups per rank
    ((10_000, MIB, "auto", MIB, 64 * GIB, 100), 25),
    ((399, MIB, "auto", MIB, 64 * GIB, 100), 1),
    ((400, MIB, "auto", MIB, 64 * GIB, 100), 1),
    ((0, 0, "auto", MIB, GIB, 8), 1),
]


@pytest.mark.parametrize(("given", "expected"), CASES)
def test_decisions(given, expected):
    samples, nbytes, asked, stripe_nbytes, memory, ranks = given
    found = choose_groups(
        samples, nbytes, parse_buffer(asked), stripe(stripe_nbytes), memory, ranks
    )
    assert found.samples == expected
    assert found.limit_nbytes is None
    assert found.reason


@given(st.integers(1, 10**6), st.integers(1, 10**5))
def test_equal_groups_are_as_many_as_full_ones(samples, fit):
    found = choose_groups(samples, 10, (None, 10 * fit), stripe(), GIB).samples
    groups = -(-samples // min(fit, samples))
    assert found <= fit
    assert -(-samples // found) == groups
    assert groups * found - samples < groups  # what the last group lacks


def test_ragged_samples_have_a_limit():
    sizes = np.array([100, 300, 200, 200])
    found = choose_groups(4, sizes, (None, 450), stripe(), GIB)
    assert (found.samples, found.limit_nbytes) == (2, 450)
    assert choose_groups(4, sizes, (2, None), stripe(), GIB).limit_nbytes is None


def by_hand(sizes, limit):
    edges, held = [0], 0
    for i, n in enumerate(sizes):
        if i > edges[-1] and held + n > limit:
            edges.append(i)
            held = 0
        held += n
    return edges + [len(sizes)] * (len(sizes) > edges[-1])


@given(
    st.lists(st.integers(0, 30), max_size=60),
    st.integers(1, 50),
    st.lists(st.integers(0, 60), max_size=4),
)
def test_edges_by_bytes(sizes, limit, cuts):
    parts = np.split(np.array(sizes, np.int64), sorted(min(c, len(sizes)) for c in cuts))
    found = edges_by_bytes(parts, limit)
    assert found.dtype == np.int64
    assert found.tolist() == by_hand(sizes, limit)


def test_a_sample_beyond_the_limit_is_a_group_of_its_own():
    assert edges_by_bytes([np.array([1, 99, 1, 1])], 10).tolist() == [0, 1, 2, 4]
    fails(lambda: edges_by_bytes([], 0), UsageError)


def test_warnings():
    def given(nbytes=128 * MIB, **more):
        return group_warnings(8192, 64, nbytes, memory=GIB, **more)

    assert given() == []
    assert given(ranks=64) == []
    assert given(ranks=65)[0].startswith("fewer groups (64) than ranks (65)")
    # S < N/G = 8192 / 64 = 128
    assert given(epochs=127) == []
    assert "S >= N/G" in given(epochs=128)[0]
    # Groups of one sample: the order of groups is all there is.
    assert group_warnings(64, 64, 8, memory=GIB, epochs=9) == []
    assert given(512 * MIB) == []
    assert "two buffers" in given(513 * MIB)[0]
    assert len(given(513 * MIB, ranks=100, epochs=1000)) == 3


def test_the_largest_of_even_groups_keeps_within_the_limit():
    schema = Schema((Field("x", np.dtype("u1"), (None,)), Field("y", np.dtype("<i8"))))
    sizes = np.random.default_rng(0).integers(0, 200, 10_000)
    choice = choose_groups(len(sizes), sizes + 8, (None, 10_000), stripe(), 1 << 40)
    found = shrink_groups(choice, 10_000, schema, {"x": sizes})
    assert choice.samples // 4 < found.samples < choice.samples
    groups = np.add.reduceat(sizes, np.arange(0, len(sizes), found.samples))
    assert len(groups) * found.samples - len(sizes) < len(groups)  # the last is no short one
    assert groups.max() + 24 * found.samples <= 10_000
    assert shrink_groups(found, 10_000, schema, {"x": sizes}) == found
    sizes[77] = 9_900  # small groups would be padded as this one
    kept = shrink_groups(choice, 10_000, schema, {"x": sizes})
    assert kept == choice
    none = choose_groups(0, sizes[:0], (None, 10_000), stripe(), 1 << 40)
    assert shrink_groups(none, 10_000, schema, {"x": sizes[:0]}) == none
