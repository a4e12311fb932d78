"""What lies around a payload, and proves it: its length with a CRC before, its own CRC behind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import Bytes, Ints
from dsprep.formats.tfrecord import framing

NAME = "tfrecord"


class Frame:
    """The header and footer of a record; see ``dsprep.records``.

    Parameters
    ----------
    params
        None are needed.
    """

    before = framing.HEADER
    after = framing.FOOTER

    def __init__(self, params: Mapping[str, Any]) -> None:
        return

    def wrong(self, before: Bytes, offsets: Ints, lengths: Ints) -> NDArray[np.bool_]:
        """Return which records do not have a header for a payload of that length."""
        return np.asarray((before != framing.headers(lengths)).any(axis=1))

    def payload_wrong(
        self, buffer: Bytes, starts: Ints, lengths: Ints, after: Bytes
    ) -> NDArray[np.bool_]:
        """Return which payloads differ from the CRC behind them."""
        stored = np.ascontiguousarray(after).view("<u4").reshape(-1)
        return np.asarray(framing.payload_crcs(buffer, starts, lengths) != stored)
