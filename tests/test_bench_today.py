"""`bench read`: the dataset as it is, loaders of the user's own, and subsets of samples."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from dsprep.bench.reading import Work, bench_read, plan_read
from dsprep.bench.task import Settings
from dsprep.core.schema import FieldSpec
from dsprep.formats.options import OpenOptions

WARM = Settings(cold=False, repeat=1, batch_size=8)

LOADER = """
import h5py, numpy as np

class Batches:
    def __init__(self, data, batch_size):
        self.data, self.batch_size, self.epoch = data, batch_size, None
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __iter__(self):
        assert self.epoch is not None
        with h5py.File(self.data[0]) as file:
            for at in range(0, len(file["x"]) - self.batch_size + 1, self.batch_size):
                yield file["x"][at : at + self.batch_size] * 2.0, {"more": None}

def make_loader(data, batch_size, seed):
    return Batches(data, batch_size)

nothing = lambda: []
number = 3
"""


@pytest.fixture
def compressed(tmp_path: Path) -> list[Path]:
    """Three HDF5 files of 20 samples each, chunked and compressed."""
    rng, files = np.random.default_rng(0), []
    for i in range(3):
        files.append(tmp_path / f"part{i}.h5")
        with h5py.File(files[-1], "w") as file:
            options: dict[str, Any] = {"chunks": True, "compression": "gzip"}
            file.create_dataset("x", data=rng.normal(size=(20, 30)).astype("f4"), **options)
            file.create_dataset("y", data=np.arange(20 * i, 20 * i + 20), **options)
    return files


def measured(work: Work) -> Any:
    report = bench_read(work)
    for row in report.rows:
        assert row.problems == (), row
    return report


def test_compressed_files_are_read_as_they_are(compressed: list[Path]) -> None:
    work = plan_read(compressed, settings=WARM)
    assert {"in-place", "provenance", "dsprep"} < set(work.names)
    assert not {"h5py", "torch"} & set(work.names)  # they would read a copy
    assert set(work.plans[0].not_copied) == {"files", "source"}
    report = measured(work)
    assert report.dataset["in_place"] == ["files", "source"]
    assert "Read as it is today (in-place)" in " ".join(report.answer)


def test_folders_of_images(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "images").mkdir()
    for i in range(12):
        pixels = np.full((8, 8, 3), 20 * i, np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{i}.png")
    assert "in-place" in plan_read([tmp_path / "images"]).names
    work = plan_read([tmp_path / "images"], ["in-place"], WARM, limit="600B")
    assert work.plans[0].samples < 12
    measured(work)


def test_tar_shards_are_read_one_after_another(tmp_path: Path) -> None:
    number = 0
    (tmp_path / "shards").mkdir()
    for shard in range(3):
        with tarfile.open(tmp_path / "shards" / f"train-{shard}.tar", "w") as archive:
            for _ in range(5):
                for name, data in (("txt", b"x" * number), ("cls", b"%d" % (number % 10))):
                    info = tarfile.TarInfo(f"a/{number:04}.{name}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
                number += 1
    measured(plan_read([tmp_path / "shards"], ["in-place"], replace(WARM, ranks=2, batch_size=2)))
    reading = OpenOptions(fields=(FieldSpec("n", "cls"), FieldSpec("key", "key")), keys_as="key")
    measured(plan_read([tmp_path / "shards"], ["in-place"], WARM, reading=reading))


@pytest.fixture
def loader(tmp_path: Path) -> str:
    (tmp_path / "own_loaders.py").write_text(LOADER)
    return f"{tmp_path / 'own_loaders.py'}:make_loader"


def test_a_loader_of_ones_own(compressed: list[Path], loader: str) -> None:
    work = plan_read(compressed[:1], ["dsprep"], replace(WARM, baseline=loader))
    assert loader in work.names
    report = measured(work)
    row = next(r for r in report.rows if r.name == loader)
    assert row.notes == ("16 of 20 samples came",)
    assert f"as it is today ({loader})" in " ".join(report.answer)
