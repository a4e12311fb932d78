"""The packages on whose versions the figures of strategies depend."""

from __future__ import annotations

PACKAGES = (
    *("dsprep", "numpy", "h5py", "lmdb", "zarr", "tensorflow", "torch", "litdata"),
    *("mosaicml-streaming", "webdataset", "ffcv", "tensorstore", "zarrs", "grain", "array-record"),
    *("datasets", "pyarrow", "pylance"),
)
"""Distributions whose versions matter to figures."""
