"""Kills runs that write to an object store at random moments, and continues them.

``python tests/lab/object_kills.py [KILLS]`` (200) is on the loopback, with 5 ms latency and 3 % of
the requests failing. Each run is killed until it survives a delay that grows; between kills nothing
partial may open, and in the end every object has the bytes of a local run.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import tempfile
from pathlib import Path

import numpy as np

FORMS = [
    {"to": "hdf5", "samples_per_file": 20},
    {"to": "zarr", "chunk": 30},
    {"to": "lmdb"},
    {"to": "tfrecord", "samples_per_file": 30, "overwrite": True},
]


def convert(source, target, options, scratch):
    import dsprep

    tempfile.tempdir = scratch
    dsprep.convert(source, target, **options)


def main(kills):
    from object_server import Running
    from test_objects_writing import ENVIRONMENT, files, forget, objects

    import dsprep

    running = Running(latency=0.005, **{"500": 0.01, "503": 0.01, "reset": 0.01})
    os.environ.update(ENVIRONMENT, AWS_ENDPOINT_URL=running.endpoint)
    server, rng = running.server, random.Random(1)
    top = Path(tempfile.mkdtemp())
    source, counts = top / "source.h5", {"kills": 0, "runs": 0, "opened": 0, "refused": 0}
    samples = ({"x": np.full(700, i, "<u2"), "y": i} for i in range(90))
    dsprep.write(source, samples, length=90)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_objects_writing"])
    while counts["kills"] < kills:
        options = FORMS[counts["runs"] % len(FORMS)]
        server.objects.clear()
        local = top / f"run{counts['runs']}" / "out"
        local.parent.mkdir()
        dsprep.convert(source, local, **options)
        if "overwrite" in options:
            dsprep.convert(source, "s3://b/out", to="hdf5", samples_per_file=40)
        delay, code = 0.1, None
        while code != 0:
            arguments = source, "s3://b/out", options, str(top)
            process = context.Process(target=convert, args=arguments)
            process.start()
            process.join(rng.uniform(0.02, delay))
            process.kill()
            process.join()
            code, delay = process.exitcode, delay * 1.15
            assert code in (0, -9), code
            counts["kills"] += code == -9
            forget()
            try:
                with dsprep.open("s3://b/out") as opened:
                    assert len(opened) == 90
                    assert (opened[:]["x"][:, 0] == opened[:]["y"]).all()
                counts["opened"] += 1
                assert "/b/out.dsprep.json" in server.objects
            except (dsprep.errors.TargetError, FileNotFoundError):
                counts["refused"] += 1
                assert code != 0
        assert objects(server) == files(local.parent), options
        counts["runs"] += 1
    print(counts, "uploads left:", len(server.uploads))
    running.close()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main(int(sys.argv[1]) if sys.argv[1:] else 200)
