"""Values with the statistics of measured ones: smooth fields, particle counts, voltage traces.

What a codec or a file system makes of a dataset depends on its values. Each function says which
ratio zlib at level 6 reaches on its result at the size of the real data.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import Array


def smooth(
    rng: np.random.Generator, shape: tuple[int, ...], cell: int, axes: int | None = None
) -> NDArray[np.float32]:
    """Return noise that varies linearly between knots `cell` elements apart.

    Parameters
    ----------
    rng
        Where the knots come from.
    shape
        Of the result.
    cell
        The distance of two knots, in elements.
    axes
        How many axes, from the first one on, are smooth; all when None. Along the others the
        values are independent.

    Returns
    -------
    array
        float32, shape `shape`, mean 0, variance about ``(2 / 3) ** axes``.
    """
    axes = len(shape) if axes is None else axes
    knots = [n // cell + 2 for n in shape[:axes]]
    field = rng.standard_normal((*knots, *shape[axes:]), dtype=np.float32)
    for axis in range(axes):
        at = np.arange(shape[axis], dtype=np.float32) / np.float32(cell)
        low = at.astype(np.intp)
        weight = at - low.astype(np.float32)
        weight = weight.reshape([-1 if k == axis else 1 for k in range(len(shape))])
        field = field.take(low, axis) * (1 - weight) + field.take(low + 1, axis) * weight
    return field


def particle_counts(
    rng: np.random.Generator, edge: int, channels: int, dtype: type[np.int16] | type[np.uint16]
) -> Array:
    """Return how many dark-matter particles are in each voxel of a universe, at several times.

    A log-normal density, clumped at several lengths, from which Poisson numbers are drawn: on
    average one particle per voxel, most voxels empty, a few with dozens. All channels show the
    same universe, the later ones more clumped. zlib ratio 5.8, as in the published
    CosmoFlow archive (9.9 TB of samples in 1.7 TB).

    Returns
    -------
    array
        Shape ``(edge, edge, edge, channels)``, C order.
    """
    shape = (edge, edge, edge)
    clumps = smooth(rng, shape, 24) + smooth(rng, shape, 8) + smooth(rng, shape, 3)
    clumps /= max(float(np.std(clumps)), 1e-6)
    counts = np.empty((*shape, channels), dtype)
    for channel in range(channels):
        spread = np.float32(0.7 + 0.6 * channel / channels)
        density = np.exp(np.clip(spread * clumps - spread * spread / 2, None, 6))
        counts[..., channel] = rng.poisson(density)
    return counts


def image(rng: np.random.Generator, height: int, width: int, channels: int) -> NDArray[np.uint8]:
    """Return a picture: soft shapes, a little sensor noise.

    zlib ratio 1.4 at 256 x 256 x 3 and 1.1 at 32 x 32 x 3.

    Returns
    -------
    array
        uint8, shape ``(channels, height, width)``.
    """
    light = smooth(rng, (height, width, channels), max(1, width // 5), axes=2) * 45
    light += smooth(rng, (height, width), max(1, width // 16))[..., None] * 20
    light += rng.standard_normal(light.shape, dtype=np.float32) * 1.5
    pixels = np.clip(light + 118, 0, 255).astype(np.uint8)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def voltages(rng: np.random.Generator, bins: int, probes: int) -> NDArray[np.float32]:
    """Return the membrane potential at several points of one neuron, in units of 100 mV.

    A slow drift around rest and spikes that reach the farther probes later and weaker.
    zlib ratio 1.2 as float32, 4 when it is normalised and rounded to float16.

    Returns
    -------
    array
        float32, shape ``(bins, probes)``.
    """
    volts = np.float32(-0.7) + smooth(rng, (bins, probes), 50, axes=1) * np.float32(0.03)
    spikes = np.flatnonzero(rng.random(bins) < 0.02)
    heights = rng.uniform(0.8, 1.1, len(spikes)).astype(np.float32)
    for probe in range(probes):
        for tap, level in enumerate((0.5, 1.0, 0.6, 0.2, -0.1, -0.15, -0.1, -0.05)):
            at = spikes + tap + 2 * probe
            inside = at < bins
            volts[at[inside], probe] += np.float32(level * 0.8**probe) * heights[inside]
    return volts
