"""dsprep prepares datasets for deep learning on HPC machines.

>>> import dsprep
>>> dsprep.open("train.h5")[0]  # doctest: +SKIP
{'x': array(...), 'y': array(...)}
"""

from __future__ import annotations

__version__ = "0.1.0"
