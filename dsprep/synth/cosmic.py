"""Cosmic Tagger: particle tracks in a liquid-argon detector, as sparse images in larcv3 HDF5.

One event is one sample; it has three projections (planes) of 2048 x 1280 pixels, of which only
those with a signal are kept, as ragged rows reached through two index tables:
``extents`` (first, N; one row per event) -> ``voxel_extents`` (first, N, ID; one per plane) ->
``voxels`` (id, value). The id of pixel (x, y) is ``x * 1280 + y``.

``/Events/event_id``
    run, subrun and event of each sample.
``/Data/sparse2d_sbndwire_group``
    The charge in each pixel; also ``image_meta``, one row per plane.
``/Data/sparse2d_sbnd_cosmicseg_group``
    The label of the same pixels: 0 background, 1 cosmic, 2 neutrino.
``/Data/particle_sbndneutrino_group``
    The true particles, ``extents`` -> ``particles``, a compound of some of larcv3's members.

Everything is chunked and compressed with gzip level 1, dtypes with larcv3's own padding. About
57,000 voxels per event at full size. gzip ratio of the voxels 2.4 (charge) and 5.8 (labels) in the
real file; 2.4 and 6.4 here. `scale` multiplies the edges of the image, and with them the length
of the tracks. Source: the example file of coreyjadams/CosmicTagger, opened with h5py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dsprep.core.schema import Array
from dsprep.synth.containers import append, hdf5_file
from dsprep.synth.job import Opening, SynthJob, recipe

PLANES = 3
WIDTH, HEIGHT = 2048, 1280
PARTICLES = "particle_sbndneutrino_group"
WIRE, LABELS = "sparse2d_sbndwire_group", "sparse2d_sbnd_cosmicseg_group"

EVENT_ID = np.dtype([("run", "<i8"), ("subrun", "<i8"), ("event", "<i8")])
EXTENTS = np.dtype([("first", "<u8"), ("N", "<u4")], align=True)
VOXEL_EXTENTS = np.dtype([("first", "<u8"), ("N", "<u4"), ("ID", "<u4")])
VOXEL = np.dtype([("id", "<u8"), ("value", "<f4")], align=True)
IMAGE_META = np.dtype(
    {
        "names": ["valid", "projection_id", "image_sizes", "number_of_voxels", "origin"],
        "formats": ["u1", "<u8", ("<f8", (2,)), ("<u8", (2,)), ("<f8", (2,))],
        "offsets": [0, 8, 16, 32, 48],
        "itemsize": 72,
    }
)


PARTICLE = np.dtype(
    [(name, "<i4") for name in ("id", "shape", "current_type", "trackid", "pdg")]
    + [(name, "<f8") for name in ("px", "py", "pz", "dist_travel", "energy_init")]
    + [("vtx", [(axis, "<f8") for axis in "xyzt"]), ("process", "S64")],
    align=True,
)


def _track(rng: np.random.Generator, width: int, height: int, label: int) -> tuple[Array, Array]:
    """Return pixel numbers and labels of one straight track: a core, and a halo labelled 0."""
    angle = rng.uniform(0, np.pi)
    steps = np.arange(max(1, int(rng.uniform(0.02, 0.36) * width)))
    x = (rng.uniform(0, width) + np.cos(angle) * steps).astype(np.int64)
    y = (rng.uniform(0, height) + np.sin(angle) * steps).astype(np.int64)
    reach = rng.integers(1, 6, len(steps))
    offsets = np.arange(-4, 7)
    near = (offsets > -reach[:, None]) & (offsets <= reach[:, None] + 1)
    core = (offsets >= 0) & (offsets < 3)
    inside = near & (x >= 0)[:, None] & (x < width)[:, None]
    rows = y[:, None] + offsets
    inside &= (rows >= 0) & (rows < height)
    pixels = (x[:, None] * height + rows)[inside]
    labels = np.broadcast_to(np.where(core, label, 0), inside.shape)[inside]
    return pixels, labels


def _plane(rng: np.random.Generator, width: int, height: int) -> tuple[Array, Array]:
    """Return the charge and the labels, `VOXEL` (n,), of one plane; the same rising ids in both."""
    cosmics = 5 + int(rng.poisson(5))
    tracks = [_track(rng, width, height, 1) for _ in range(cosmics)]
    tracks += [_track(rng, width, height, 2) for _ in range(3)]
    noise = rng.integers(0, width * height, max(1, width // 4))
    pixels = np.concatenate([*(t[0] for t in tracks), noise])
    labels = np.concatenate([*(t[1] for t in tracks), np.zeros(len(noise), np.int64)])
    order = np.lexsort((-labels, pixels))  # where tracks cross, the highest label comes first
    ids, first = np.unique(pixels[order], return_index=True)
    label = labels[order][first]
    charge, segment = np.zeros(len(ids), VOXEL), np.zeros(len(ids), VOXEL)
    charge["id"] = segment["id"] = ids
    charge["value"] = 5 + rng.gamma(1.0, np.where(label == 0, 2.5, 40.0))
    segment["value"] = label
    return charge, segment


def _particles(rng: np.random.Generator) -> Array:
    """Return the particles of one neutrino interaction, `PARTICLE` (n,) with n from 2 to 13."""
    n = int(rng.integers(2, 14))
    out = np.zeros(n, PARTICLE)
    out["id"], out["trackid"], out["shape"] = np.arange(n), np.arange(n) * 2, 2
    out["pdg"] = rng.choice([13, 14, 211, 2112, 2212, 2000000101], n)
    for axis in "xyz":
        out[f"p{axis}"] = rng.normal(0, 0.4, n)
        out["vtx"][axis] = rng.uniform(-200, 500)
    out["energy_init"], out["process"] = rng.exponential(0.8, n), b"primary"
    return out


def _extent(first: int, count: int) -> Array:
    """Return one row of an index table, `EXTENTS` (1,), with zeros as padding."""
    row = np.zeros(1, EXTENTS)
    row["first"], row["N"] = first, count
    return row


def _joined(planes: list[Array]) -> Array:
    """Return the voxels of all planes, with zeros as padding, which `concatenate` leaves open."""
    voxels = np.zeros(sum(map(len, planes)), VOXEL)
    for member in ("id", "value"):
        np.concatenate([p[member] for p in planes], out=voxels[member])
    return voxels


def _dataset(file: Any, name: str, dtype: Any, chunk: int) -> Any:
    how = {"compression": "gzip", "compression_opts": 1}
    return file.create_dataset(name, (0,), dtype, chunks=(chunk,), maxshape=(None,), **how)


class _Sparse:
    """The datasets of one group of sparse images."""

    def __init__(self, file: Any, group: str) -> None:
        self.extents = _dataset(file, f"Data/{group}/extents", EXTENTS, 10)
        self.meta = _dataset(file, f"Data/{group}/image_meta", IMAGE_META, 100)
        self.voxel_extents = _dataset(file, f"Data/{group}/voxel_extents", VOXEL_EXTENTS, 100)
        self.voxels = _dataset(file, f"Data/{group}/voxels", VOXEL, 1000)

    def append(self, planes: list[Array], width: int, height: int) -> None:
        """Add one event."""
        rows = np.zeros(len(planes), VOXEL_EXTENTS)
        meta = np.zeros(len(planes), IMAGE_META)
        rows["N"] = [len(p) for p in planes]
        rows["first"] = self.voxels.shape[0] + np.cumsum([0, *rows["N"][:-1]])
        rows["ID"] = meta["projection_id"] = np.arange(len(planes))
        meta["valid"] = 1
        meta["image_sizes"] = meta["number_of_voxels"] = (width, height)
        first = self.voxel_extents.shape[0]
        append(self.extents, _extent(first, len(planes)))
        append(self.voxel_extents, rows)
        append(self.meta, meta)
        append(self.voxels, _joined(planes))


@recipe(
    "cosmic-tagger",
    "Cosmic Tagger (larcv3), one HDF5 file: voxels reached through two index tables, gzip",
    samples=24,
    scale=1 / 2,
)
def _write(job: SynthJob) -> Opening:
    width, height = job.edge(WIDTH), job.edge(HEIGHT)
    with hdf5_file(job.path) as file:
        events = _dataset(file, "Events/event_id", EVENT_ID, 100)
        extents = _dataset(file, f"Data/{PARTICLES}/extents", EXTENTS, 100)
        particles = _dataset(file, f"Data/{PARTICLES}/particles", PARTICLE, 500)
        wire, labels = _Sparse(file, WIRE), _Sparse(file, LABELS)
        for i in range(job.samples):
            rng = job.rng("cosmic-tagger", i)
            planes = [_plane(rng, width, height) for _ in range(PLANES)]
            wire.append([p[0] for p in planes], width, height)
            labels.append([p[1] for p in planes], width, height)
            event = _particles(rng)
            append(extents, _extent(particles.shape[0], len(event)))
            append(particles, event)
            append(events, np.array([(1, i // 100, i)], EVENT_ID))
            job.done(i + 1)
    return ()
