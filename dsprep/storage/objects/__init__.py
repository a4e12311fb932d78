"""Object stores: ``s3://``, ``gs://``, ``az://``, ``https://``, by obstore.

`requests` makes the requests of this process, `store` has what a `Store` and a `Handle` are there.
"""

from __future__ import annotations

from dsprep.errors import MissingExtra

try:
    import obstore as _obstore  # noqa: F401
except ImportError as error:
    raise MissingExtra(
        "URLs need obstore", fix="pip install 'dsprep[objects]', or copy the data to a disk"
    ) from error
