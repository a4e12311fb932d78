"""MosaicML streaming: MDS shards, read by the workers of a torch DataLoader.

Shards of 64 MiB, uncompressed, and a dataset with ``local`` alone: nothing is downloaded. The
order is its default ``py1e``. With ``num_canonical_nodes=1``, its own default for one node, and
one rank no sample comes twice. It shares out samples only inside ``torch.distributed``: one
process is measured. What it leaves in shared memory and in the folder for temporary files, the
names of which begin with a number of its own, is removed when the strategy is closed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, ClassVar

from dsprep.bench.strategies.peers import CHUNK, Peer, names, samples, stored
from dsprep.formats.base import Source


class Streaming(Peer):
    """A DataLoader with ``threads`` workers over a StreamingDataset."""

    project: ClassVar[str] = "streaming"
    alone: ClassVar[str] = "it takes ranks from torch.distributed"

    @classmethod
    def save(cls, source: Source, target: Path) -> None:
        """Write the directory of shards."""
        from streaming import MDSWriter

        columns = {}
        for name, f in zip(names(source.schema), source.schema, strict=True):
            dtype, shape = stored(f)
            columns[name] = f"ndarray:{dtype.name}:{','.join(map(str, shape))}"
        with MDSWriter(columns=columns, out=str(target), size_limit=CHUNK) as writer:
            for sample in samples(source):
                writer.write(sample)

    def made(self, resources: ExitStack) -> Any:
        """Read the index; its shared memory is made."""
        from streaming import StreamingDataset
        from torch.utils.data import DataLoader

        task = self.task
        self._dataset = StreamingDataset(
            local=str(task.path),
            shuffle=True,
            shuffle_seed=task.seed,
            batch_size=task.batch_size,
            num_canonical_nodes=1,
        )
        resources.callback(_remove_shared, self._dataset)
        return DataLoader(self._dataset, task.batch_size, **self.workers)

    def epoch(self, number: int) -> Iterator[Any]:
        """Yield the DataLoader's batches, in this epoch's order."""
        self._dataset.next_epoch = number
        return super().epoch(number)


def _remove_shared(dataset: Any) -> None:
    """Remove what a dataset shared with its workers, which have ended."""
    for segment in _segments(vars(dataset)):
        segment.cleanup()
    for folder in ("/dev/shm", tempfile.gettempdir()):
        for path in Path(folder).glob(f"{dataset._shm_prefix_int:06}_*"):
            with suppress(OSError):
                path.unlink()


def _segments(state: dict[str, Any]) -> Iterator[Any]:
    """Yield the blocks of shared memory that a dataset holds, at any depth."""
    from streaming.base.shared import SharedMemory

    for value in state.values():
        if isinstance(value, SharedMemory):
            yield value
        elif type(value).__module__.startswith("streaming.base.shared"):
            yield from _segments(vars(value))
