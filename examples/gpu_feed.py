"""How well a GPU is fed: `dsprep.torch.Batches(..., device="cuda")` beside what the machine can do.

    python examples/gpu_feed.py                                  # makes 4 GB of samples of 19.2 kB
    python examples/gpu_feed.py grouped.h5 --batch-size 512 --json gpu.json

Measured are: copies from pinned memory to the GPU, plain reads of the same file from the page cache
and cold, the feed from either (a share of the slower of copies and reads), and then a training
loop whose steps compute longer than a batch takes to arrive: how often the training stream waited
for data, by CUDA events, and how long the program waited for a batch. Needs a GPU; without one it
says so and exits with 2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np

import dsprep

GOAL = 0.95
BLOCK = 16 << 20
GAP_MS = 0.05
"""The shortest pause of the training stream that counts as waiting."""


def made(folder: Path, gigabytes: float, sample_kb: float, group: str) -> Path:
    """Return a repacked dataset of random samples of float32 with a label each."""
    values = max(1, round(sample_kb * 1e3 / 4))
    count = max(64, round(gigabytes * 1e9 / (4 * values + 8)))
    print(f"making {count:,} samples of {4 * values / 1e3:.1f} kB", file=sys.stderr, flush=True)
    plain, grouped = folder / "plain.h5", folder / "grouped.h5"
    block = np.random.default_rng(0).random((min(count, 1024), values), np.float32)
    with h5py.File(plain, "w") as file:
        x = file.create_dataset("x", (count, values), "f4")
        for i in range(0, count, len(block)):
            x[i : i + len(block)] = np.roll(block, i)[: count - i]
        file["y"] = np.arange(count)
    dsprep.repack(plain, grouped, buffer_size=group, measure=False)
    plain.unlink()
    return grouped


def files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else [p for p in sorted(path.rglob("*")) if p.is_file()]


def drop(path: Path) -> None:
    """Drop a dataset from the page cache."""
    for file in files_of(path):
        fd = os.open(file, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_all(path: Path, threads: int) -> float:
    """Read all files of a dataset in blocks; return bytes per second."""
    blocks = [(f, at) for f in files_of(path) for at in range(0, f.stat().st_size, BLOCK)]

    def read(part: Sequence[tuple[Path, int]]) -> int:
        room, nbytes = memoryview(bytearray(BLOCK)), 0
        for file, at in part:
            fd = os.open(file, os.O_RDONLY)
            nbytes += os.preadv(fd, [room], at)
            os.close(fd)
        return nbytes

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        nbytes = sum(pool.map(read, [blocks[i::threads] for i in range(threads)]))
    return nbytes / (time.perf_counter() - began)


# --- with a GPU ---------------------------------------------------------------------------------


def copies(torch, device, nbytes: int = 256 << 20, runs: int = 10) -> float:
    """Return bytes per second of copies from pinned memory to the GPU, by events: the median."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    found = []
    for _ in range(runs + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        there.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        found.append(nbytes / begin.elapsed_time(end) * 1e3)
    return statistics.median(found[1:])


def nbytes_of(batch) -> int:
    return sum(tensor.nbytes for tensor in batch.values())


def feed(torch, batches, epochs: int) -> list[float]:
    """Return bytes per second of each epoch; nothing is computed."""
    rates = []
    for _ in range(epochs):
        began, nbytes = time.perf_counter(), 0
        for batch in batches:
            nbytes += nbytes_of(batch)
        torch.cuda.synchronize()
        rates.append(nbytes / (time.perf_counter() - began))
    return rates


def work_of(torch, device, seconds: float) -> Callable[[], None]:
    """Return a step that keeps the GPU busy for about so long."""
    matrix = torch.rand(2048, 2048, device=device)

    def step(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix)

    step(10)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step(100)
    end.record()
    end.synchronize()
    times = max(1, round(seconds / (begin.elapsed_time(end) / 1e3 / 100)))
    return lambda: step(times)


def train(torch, batches, step: Callable[[], None], most: int) -> dict[str, float]:
    """Compute on every batch; return how long program and training stream waited."""
    waits, events, loop = [], [], iter(batches)
    while len(waits) < most:
        began = time.perf_counter()
        batch = next(loop, None)
        if batch is None:
            break
        waits.append(1e3 * (time.perf_counter() - began))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()  # behind the copy, for which the stream waits
        sum(tensor.view(-1)[:1].float().sum() for tensor in batch.values())
        step()
        end.record()
        events.append((begin, end))
        if len(events) > 2:
            events[-3][1].synchronize()  # as a program that looks at its loss
    torch.cuda.synchronize()
    loop.close()
    pairs = pairwise(events)
    gaps = [before[1].elapsed_time(after[0]) for before, after in pairs]
    return summary(waits, gaps, [begin.elapsed_time(end) for begin, end in events])


def measure(torch, path: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return all figures: rates in bytes per second, times in milliseconds."""
    from dsprep.torch import Batches

    device = torch.device("cuda", torch.cuda.current_device())
    arguments = {"batch_size": options.batch_size, "device": device, "remainder": "drop"}
    found = {"pinned": copies(torch, device)}
    read_all(path, options.threads)
    found["read_warm"] = max(read_all(path, options.threads) for _ in range(3))
    warm = Batches(path, epochs=options.epochs + 1, **arguments)
    found["feed_warm"] = statistics.median(feed(torch, warm, options.epochs + 1)[1:])
    warm.close()
    drop(path)
    found["read_cold"] = read_all(path, options.threads)
    drop(path)
    cold = Batches(path, epochs=1, **arguments)
    found["feed_cold"] = feed(torch, cold, 1)[0]
    cold.close()
    batches = Batches(path, epochs=2, **arguments)
    for batch in batches:
        nbytes = nbytes_of(batch)
    seconds = 1.5 * nbytes / found["feed_warm"]
    found |= train(torch, batches, work_of(torch, device, seconds), options.steps)
    batches.close()
    return found


# --- what is said -------------------------------------------------------------------------------


def summary(waits: list[float], gaps: list[float], steps: list[float]) -> dict[str, float]:
    """Return what a training loop says; the first two batches begin it, and are left out."""
    later, between = sorted(waits[2:] or waits), gaps[2:] or gaps or [0.0]
    idle = [gap for gap in between if gap > GAP_MS]
    return {
        "steps": len(waits),
        "step_ms": statistics.median(steps),
        "first_ms": waits[0],
        "wait_p50_ms": statistics.median(later),
        "wait_p99_ms": later[min(len(later) - 1, round(0.99 * len(later)))],
        "stream_waits": len(idle),
        "stream_waited_ms": sum(idle),
    }


def report(found: dict[str, float]) -> str:
    """Return the figures for a person."""

    def rate(name: str) -> str:
        return f"{found[name] / 1e9:.2f} GB/s"

    lines = [f"pinned memory to GPU: {rate('pinned')}"]
    for how, words in (("warm", "from the page cache"), ("cold", "cold")):
        limit = min(found["pinned"], found[f"read_{how}"])
        share = found[f"feed_{how}"] / limit
        lines.append(
            f"feed {words}: {rate(f'feed_{how}')}, {share:.2f} of the slower of copies and plain "
            f"reads ({rate(f'read_{how}')}); goal {GOAL}"
        )
    lines.append(
        f"training, {found['steps']} steps of {found['step_ms']:.2f} ms: the stream waited "
        f"{found['stream_waits']} times, {found['stream_waited_ms']:.2f} ms in all"
    )
    lines.append(
        f"waiting for a batch: first {found['first_ms']:.1f} ms, then p50 "
        f"{found['wait_p50_ms']:.3f} ms, p99 {found['wait_p99_ms']:.3f} ms"
    )
    return "\n".join(lines)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="?", type=Path, help="a repacked dataset; else one is made")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--gigabytes", type=float, default=4, help="size of what is made")
    parser.add_argument("--sample-kb", type=float, default=19.2, help="its samples")
    parser.add_argument("--group", default="64MiB", help="its groups")
    parser.add_argument("--epochs", type=int, default=3, help="epochs from the page cache")
    parser.add_argument("--steps", type=int, default=500, help="steps of the training loop")
    cores = min(4, len(os.sched_getaffinity(0)))
    parser.add_argument("--threads", type=int, default=cores, help="of the plain reads")
    parser.add_argument("--directory", type=Path, help="where to make it")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    return parser


def main() -> None:
    options = arguments().parse_args()
    try:
        import torch
    except ImportError:
        sys.exit(refused("PyTorch is not installed: pip install 'dsprep[torch]'"))
    if not torch.cuda.is_available():
        sys.exit(refused("PyTorch sees no GPU here"))
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="gpu-feed-") as folder:
        path = options.data
        if path is None:
            path = made(Path(folder), options.gigabytes, options.sample_kb, options.group)
        found = measure(torch, path, options)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    print(report(found))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


def refused(why: str) -> int:
    print(f"gpu_feed: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
