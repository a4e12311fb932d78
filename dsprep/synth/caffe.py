"""Caffe's LMDB databases of ``Datum`` messages.

``caffe-cifar``
    As ``convert_cifar_data`` writes it: an environment directory, all records in one transaction,
    keys ``%05d``, pictures of 3 x 32 x 32 bytes (a record of 3,083 bytes).
``caffe-imageset``
    As ``convert_imageset`` writes it: keys ``%08d_FILENAME``, one transaction per 1,000 records,
    pictures of 3 x 256 x 256 bytes (about 197 kB).

Datum (proto2): channels = 1, height = 2, width = 3, data = 4 (bytes), label = 5, encoded = 7.
Sources: BVLC/caffe ``src/caffe/proto/caffe.proto``, ``examples/cifar10/convert_cifar_data.cpp``,
``tools/convert_imageset.cpp``, ``src/caffe/util/db_lmdb.cpp``.
"""

from __future__ import annotations

from dsprep.core.schema import Array
from dsprep.synth.containers import blob, integer, lmdb_environment
from dsprep.synth.job import Opening, SynthJob, recipe
from dsprep.synth.values import image

PER_COMMIT = 1000
OPEN = ("", "--values", "datum")


def datum(pixels: Array, label: int) -> bytes:
    """Return a raw (not encoded) picture, uint8 (channels, height, width), as a ``Datum``."""
    sizes = b"".join(integer(k + 1, n) for k, n in enumerate(pixels.shape))
    return sizes + blob(4, pixels.tobytes()) + integer(5, label)


def _map_size(job: SynthJob, record: int) -> int:
    """Return room for twice the pages of all records, so that a rewritten tree fits too."""
    return 2 * job.samples * (record + 3 * 4096) + (64 << 20)


@recipe(
    "caffe-cifar",
    "CIFAR-10 as Caffe's LMDB: Datum of uint8[3,32,32] and a label, one transaction",
    samples=2000,
    scale=1,
)
def _write_cifar(job: SynthJob) -> Opening:
    edge = job.edge(32)
    with (
        lmdb_environment(
            job.path, subdir=True, map_size=_map_size(job, 3 * edge * edge)
        ) as environment,
        environment.begin(write=True) as transaction,
    ):
        for i in range(job.samples):
            rng = job.rng("caffe-cifar", i)
            label = int(rng.integers(10))
            transaction.put(b"%05d" % i, datum(image(rng, edge, edge, 3), label))
            job.done(i + 1)
    return OPEN


@recipe(
    "caffe-imageset",
    "an image set as Caffe's LMDB: Datum of uint8[3,256,256] and a label, 1,000 per commit",
    samples=1200,
    scale=1 / 4,
)
def _write_imageset(job: SynthJob) -> Opening:
    edge = job.edge(256)
    not_encoded = integer(7, 0)  # convert_imageset sets the member even where it is false
    with lmdb_environment(
        job.path, subdir=True, map_size=_map_size(job, 3 * edge * edge)
    ) as environment:
        for first in range(0, job.samples, PER_COMMIT):
            with environment.begin(write=True) as transaction:
                for i in range(first, min(first + PER_COMMIT, job.samples)):
                    rng = job.rng("caffe-imageset", i)
                    label = int(rng.integers(1000))
                    folder = b"n%08d" % (1440764 + 97 * label)
                    key = b"%08d_%b/%b_%d.JPEG" % (i, folder, folder, rng.integers(1, 99999))
                    transaction.put(key, datum(image(rng, edge, edge, 3), label) + not_encoded)
                    job.done(i + 1)
    return OPEN
