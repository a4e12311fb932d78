"""A conversion on Dask workers, from Python: of a cluster that runs, or of this machine.

    python examples/convert_dask.py --executor dask:tcp://host:8786 'day*.h5' days --to zarr

On SLURM, ``dask_jobqueue.SLURMCluster(...).scale(jobs=16)`` starts such workers and tells the
address. They have to see the same files under the same names. Without arguments a small dataset is
made and converted by two workers of this machine.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import dsprep
from dsprep import executors
from dsprep.synth import synth


def main() -> None:
    """Convert, and prove that nothing changed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", nargs="?")
    parser.add_argument("target", nargs="?")
    parser.add_argument("--to", default="zarr", choices=["hdf5", "lmdb", "tfrecord", "zarr"])
    parser.add_argument("--shard-size", default="1MiB", help="of values: what one worker writes")
    parser.add_argument("--executor", default="dask", help="dask:ADDRESS, else local")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source, target = options.source, options.target
        if source is None or target is None:
            source = str(synth("cosmoflow-h5", Path(folder) / "cosmo").path)
            target = str(Path(folder) / "converted")
        with executors.opened(options.executor, workers=2) as executor:
            made = dsprep.convert(
                source, target, to=options.to, shard_size=options.shard_size, executor=executor
            )
            with dsprep.open(source) as a, dsprep.open(target) as b:
                same = dsprep.verify(a, b, executor=executor).same
    print(f"{made.samples} samples in {made.files} files: {'same' if same else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
