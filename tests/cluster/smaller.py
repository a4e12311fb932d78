"""``dsprep`` whose tasks are smaller, so that small data make many of them.

It is run as ``python smaller.py repack ...``.
"""

from __future__ import annotations

import dsprep.remote
from dsprep.cli import main

if __name__ == "__main__":
    dsprep.remote.PART_NBYTES = 8 << 20
    main()
