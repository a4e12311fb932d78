"""Spans of memory are copied as one slice at a time would."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsprep.core.spans import LONG, move_spans, offsets_of

LENGTHS = st.one_of(
    st.lists(st.integers(0, 70), min_size=1, max_size=40),
    st.lists(st.sampled_from([0, 1, 2, 127, 128, 129, LONG - 1, LONG, 4 * LONG]), min_size=1),
    st.tuples(st.integers(0, 40), st.integers(1, 60)).map(lambda pair: [pair[0]] * pair[1]),
)


@given(lengths=LENGTHS, seed=st.integers(0, 1 << 30), gap=st.integers(0, 3))
def test_every_span_is_copied_and_nothing_else(lengths, seed, gap):
    rng, count = np.random.default_rng(seed), len(lengths)
    sizes = np.array(lengths, np.int64)
    source = rng.integers(0, 256, int(sizes.sum()) + 1, np.uint8)
    starts = rng.integers(0, np.maximum(1, len(source) - sizes))
    order = rng.permutation(count)
    targets = np.empty(count, np.int64)
    targets[order] = offsets_of(sizes[order] + gap)[:-1]
    out = rng.integers(0, 256, int((sizes + gap).sum()) + 1, np.uint8)
    expected = out.copy()
    for start, size, target in zip(starts.tolist(), lengths, targets.tolist(), strict=True):
        expected[target : target + size] = source[start : start + size]
    source.flags.writeable = False
    move_spans(source, starts, sizes, out, targets)
    np.testing.assert_array_equal(out, expected)


def test_spans_of_the_whole_memory():
    for nbytes in (1, 2, 3, 255):
        source, out = np.arange(nbytes, dtype=np.uint8), np.zeros(nbytes, np.uint8)
        whole = np.array([nbytes])
        move_spans(source, np.zeros(1, np.int64), whole, out, np.zeros(1, np.int64))
        assert out.tolist() == source.tolist()
    with pytest.raises(IndexError):
        move_spans(source, np.array([1, 5]), np.array([255, 3]), out, np.array([0, 9]))
