"""Storage figures that papers published or imply, and what `--storage` means."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dsprep.core.units import parse_nbytes, parse_rate, parse_seconds
from dsprep.errors import UsageError, near
from dsprep.planning.storage_figures import NORMAL_P99, ReadSeconds, StorageFigures
from dsprep.planning.waiting import excess


@dataclass(frozen=True)
class Measured:
    """Exposed I/O that Lee et al. measured, in seconds of an epoch.

    Attributes
    ----------
    samples, sample_nbytes, group, batch_size
        Of the dataset, of its groups (a file each), and of a step of all ranks.
    rows
        By number of GPUs: TF, TF-Pre, Async I/O, Async I/O (DB), and what steps compute.
    """

    samples: int
    sample_nbytes: int
    group: int
    batch_size: int
    rows: Mapping[int, tuple[float, float, float, float, float]]

    def calibrated(self, ranks: int) -> tuple[float, float]:
        """Return seconds of a call and bytes per second of a process, from one row's TF, Async."""
        single, _, grouped, _, _ = self.rows[ranks]
        each = self.samples / ranks
        return (single - grouped) / each, each * self.sample_nbytes / grouped


COSMO = 8192, 128**3 * 12 * 2, 128, 256
NEURON = 64 * 609_486, (1600 * 3 + 19) * 4, 609_486, 32_768

LEE = {
    ("Cori", "CosmoFlow"): Measured(
        *COSMO, {32: (46.03, 28.91, 43.18, 10.71, 38.0), 64: (27.65, 14.39, 21.82, 4.0, 19.3)}
    ),
    ("Summit", "CosmoFlow"): Measured(
        *COSMO, {32: (4.12, 1.99, 2.29, 0.0, 18.3), 64: (3.46, 1.13, 1.71, 0.0, 9.6)}
    ),
    ("Cori", "Neuron Inverter"): Measured(
        *NEURON,
        {
            16: (53384.49, 53100.29, 199.99, 0.0, 390.0),
            32: (25899.36, 25703.93, 113.42, 0.0, 200.0),
            64: (13798.48, 13664.83, 77.95, 0.0, 97.0),
        },
    ),
    ("Summit", "Neuron Inverter"): Measured(
        *NEURON,
        {
            16: (45677.48, 40259.47, 54.96, 0.0, 770.0),
            32: (24499.22, 22095.84, 26.23, 0.0, 400.0),
            64: (10820.49, 10660.43, 14.52, 0.0, 215.0),
        },
    ),
}
"""Lee et al., "Asynchronous I/O Strategy for Large-Scale Deep Learning Applications" (HiPC 2021),
Tables II to V."""

SERVERS, SERVER_RATE, SEEK = 10, 2e9, 0.74e-3
"""Of the GPFS of Pumma et al. (ACM TOPC 2019): assumed, assumed, and from PROV against STAG."""

COSMOFLOW_STEP, COSMOFLOW_READ = 0.129, 8e6
"""Seconds of a step without I/O, and bytes that it reads. Mathuriya et al. (SC18)."""

COSMOFLOW_IO = {128: 0.179 - 0.021, 1024: 0.129 / 0.58 - 0.033}
"""Seconds of a step on Lustre by nodes, less what communication takes there (DataWarp's steps)."""

OST_RATE, OSTS = 700e9 / 248, 64
"""Bytes per second of one of Cori's targets, and over how many CosmoFlow's files lay."""


def fitted_spread() -> tuple[float, float]:
    """Return mean and sigma of lognormal reads whose slowest of P are those of `COSMOFLOW_IO`."""
    (few, fast), (many, slow) = COSMOFLOW_IO.items()
    low, high = 0.0, 2.0
    for _ in range(40):
        sigma = (low + high) / 2
        ratio = excess(1.0, sigma, many) / excess(1.0, sigma, few)
        low, high = (sigma, high) if ratio < slow / fast else (low, sigma)
    return fast / excess(1.0, sigma, few), sigma


def _lee(machine: str) -> StorageFigures:
    """Return L of the first row, W and A of the first and last one: 1/w = 1/W + P/A."""
    table = LEE[machine, "Neuron Inverter"]
    few, *_, many = table.rows
    call, rate = table.calibrated(few)
    total = (many - few) / (1 / table.calibrated(many)[1] - 1 / rate)
    return StorageFigures(
        name=f"{machine}, Lee et al. (HiPC 2021)",
        call_seconds=call,
        stream_bytes_per_second=1 / (1 / rate - few / total),
        total_bytes_per_second=total,
        obtained="Neuron Inverter, 16 and 64 GPUs; a call through h5py and tf.data",
    )


def _cosmoflow() -> StorageFigures:
    mean, sigma = fitted_spread()
    median = mean * math.exp(-(sigma**2) / 2)
    p99, p999 = (median * math.exp(z * sigma) for z in (NORMAL_P99, 3.0902))
    return StorageFigures(
        name="Cori's Lustre, Mathuriya et al. (SC18)",
        call_seconds=0.0,
        stream_bytes_per_second=COSMOFLOW_READ / mean,
        total_bytes_per_second=OSTS * OST_RATE,
        read_seconds=ReadSeconds(median, p99, p999),
        spread_nbytes=int(COSMOFLOW_READ),
        obtained="steps of 128 and 1,024 nodes; 64 targets; a call is part of the stream",
    )


def _pumma() -> StorageFigures:
    return StorageFigures(
        name="the GPFS of Pumma et al. (ACM TOPC 2019)",
        call_seconds=0.0,
        stream_bytes_per_second=SERVER_RATE,
        total_bytes_per_second=SERVERS * SERVER_RATE,
        seek_seconds=SEEK,
        obtained="10 servers of 2 GB/s assumed, seek from PROV against STAG",
    )


PRESETS: dict[str, Callable[[], StorageFigures]] = {
    "cori": lambda: _lee("Cori"),
    "summit": lambda: _lee("Summit"),
    "cori-lustre": _cosmoflow,
    "lmdbio": _pumma,
}
"""Storage by name; see `StorageFigures.obtained` for how little some of it is based on."""

BY_HAND = {
    "latency": ("call_seconds", parse_seconds),
    "stream": ("stream_bytes_per_second", parse_rate),
    "total": ("total_bytes_per_second", parse_rate),
    "seek": ("seek_seconds", parse_seconds),
    "opens": ("opens_per_second", float),
}
"""What `--storage` takes by hand: names, fields, and how they are written."""


def parse_storage(text: str) -> StorageFigures:
    """Return the figures of a preset, a file of `bench storage`, or ``latency=1ms,stream=1GB/s``.

    ``p50``, ``p99`` and ``read`` (bytes) give the spread.

    Raises
    ------
    UsageError
        If it is none of these.
    FormatError
        If the file is damaged.
    """
    if text in PRESETS:
        return PRESETS[text]()
    if "=" not in text:
        if not Path(text).is_file():
            words = f"FILE of bench storage, {', '.join(PRESETS)}, or latency=1ms,stream=500MB/s"
            raise UsageError(
                f"there is no storage {text!r}", expected=words, fix=near(text, PRESETS)
            )
        return StorageFigures.load(Path(text))
    given: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        given[name.strip()] = value.strip()
    spread = {k: given.pop(k) for k in ("p50", "p99", "read") if k in given}
    if unknown := [name for name in given if name not in BY_HAND]:
        known = [*BY_HAND, "p50", "p99", "read"]
        raise UsageError(f"--storage has no {unknown[0]!r}", expected=", ".join(known))
    if missing := [name for name in ("latency", "stream") if name not in given]:
        raise UsageError(f"--storage has no {missing[0]}", fix="such as latency=1ms,stream=1GB/s")
    try:
        fields = {BY_HAND[k][0]: BY_HAND[k][1](v) for k, v in given.items()}
    except ValueError as error:
        raise UsageError(f"--storage: {error}") from error
    if spread:
        if len(spread) < 3:
            raise UsageError("p50, p99 and read belong together", found=", ".join(spread))
        p50, p99 = parse_seconds(spread["p50"]), parse_seconds(spread["p99"])
        fields["read_seconds"] = ReadSeconds(p50, p99, p99)
        fields["spread_nbytes"] = parse_nbytes(spread["read"])
    return StorageFigures(name="by hand", obtained="by hand", **fields)
