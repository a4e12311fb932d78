"""Figures that papers published (``published.json``), and what `--storage` means."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from dsprep.core.units import parse_nbytes, parse_rate, parse_seconds
from dsprep.errors import UsageError, near
from dsprep.planning.storage_figures import HEADER, REQUIRED, ReadSeconds, StorageFigures

BY_HAND: dict[str, tuple[str, Callable[[str], Any]]] = {
    "latency": ("call_seconds", parse_seconds),
    "stream": ("stream_bytes_per_second", parse_rate),
    "total": ("total_bytes_per_second", parse_rate),
    "seek": ("seek_seconds", parse_seconds),
    "opens": ("opens_per_second", float),
    "p50": ("p50", parse_seconds),
    "p99": ("p99", parse_seconds),
    "read": ("spread_nbytes", parse_nbytes),
}
"""Figures that `--storage` takes by hand: names, fields, and their notation."""


@cache
def published() -> dict[str, Any]:
    """Return what papers published, by their first author; ``storage``: figures by name."""
    content: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
    return content


def preset(name: str) -> StorageFigures:
    """Return storage that papers measured; `obtained` says on how little some of it is based."""
    return StorageFigures.from_json({**HEADER, **published()["storage"][name]}, name)


def parse_storage(text: str) -> StorageFigures:
    """Return the figures of a preset, a file of `bench storage`, or ``latency=1ms,stream=1GB/s``.

    Raises
    ------
    UsageError
        If it is none of these.
    FormatError
        If the file is damaged.
    """
    presets = published()["storage"]
    if text in presets:
        return preset(text)
    if "=" not in text:
        if not Path(text).is_file():
            ways = f"FILE of bench storage, {', '.join(presets)}, or latency=1ms,stream=500MB/s"
            raise UsageError(
                f"there is no storage {text!r}", expected=ways, fix=near(text, presets)
            )
        return StorageFigures.load(Path(text))
    fields: dict[str, Any] = {"name": "by hand", "obtained": "by hand"}
    for part in text.split(","):
        name, _, value = map(str.strip, part.partition("="))
        if name not in BY_HAND:
            raise UsageError(f"--storage has no {name!r}", expected=", ".join(BY_HAND))
        try:
            fields[BY_HAND[name][0]] = BY_HAND[name][1](value)
        except ValueError as error:
            raise UsageError(f"--storage {name}: {error}") from error
    quantiles = [fields.pop(k) for k in ("p50", "p99") if k in fields]
    if len(quantiles) == 1 or not {*REQUIRED} <= fields.keys():
        fix = "give latency=1ms,stream=1GB/s at least, and of p50=, p99=, read= all or none"
        raise UsageError(f"--storage {text} is incomplete", fix=fix)
    if quantiles:
        fields["read_seconds"] = ReadSeconds(quantiles[0], quantiles[1], quantiles[1])
    return StorageFigures(**fields)
