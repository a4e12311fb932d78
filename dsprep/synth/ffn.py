"""Flood-filling networks: the coordinates from which training examples are cut.

One TFRecord file, as a whole one gzip stream, of Examples with ``center``, int64 (1, 3), in the
order x, y, z, and ``label_volume_name``, one byte string. `scale` multiplies the edges of the
volume. Source: google/ffn ``build_coordinates.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dsprep.synth.containers import bytes_feature, example, int64_feature, write_records
from dsprep.synth.job import Opening, SynthJob, recipe

BLOCK = 1024
"""Samples that are drawn together; always as many, so that none depends on how many are made."""
MARGIN = 24
VOLUMES = (b"validation1", b"training1", b"training2", b"fib25-cropped")


def _examples(job: SynthJob) -> Iterator[bytes]:
    low, high = job.edge(MARGIN), job.edge(520 - MARGIN) + 1
    for first in range(0, job.samples, BLOCK):
        rng = job.rng("ffn-coords", first)
        centers = rng.integers(low, high, (BLOCK, 1, 3), np.int64)
        volumes = rng.integers(len(VOLUMES), size=BLOCK)
        count = min(BLOCK, job.samples - first)
        for center, volume in zip(centers[:count], volumes[:count], strict=True):
            yield example(
                {
                    "center": int64_feature(center),
                    "label_volume_name": bytes_feature(VOLUMES[volume]),
                }
            )
        job.done(first + count)


@recipe(
    "ffn-coords",
    "coordinates for flood-filling networks, one gzip TFRecord: int64[1,3] and a volume name",
    samples=20_000,
    scale=1,
)
def _write(job: SynthJob) -> Opening:
    write_records(job.path, _examples(job), gzip=True)
    return ()
