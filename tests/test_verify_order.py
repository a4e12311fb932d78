"""`dsprep verify` knows what repack did to the order, and notices what else is different."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from support import cli

import dsprep
from dsprep.errors import UsageError


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("order") / "a.h5"
    with h5py.File(path, "w") as file:
        file["i"] = np.arange(300)
        file["patient"] = np.arange(300) // 10
        file["word"] = np.array([f"w{i}" for i in range(300)], object)
    return path


WAYS = {
    "duplicated": ["--shuffle", "7", "--duplicate", "2"],
    "subset": ["--subset", "i % 3 == 0 and word != 'w9'"],
    "shuffled-subset": ["--subset", "train of train=0.5,val=0.5 by patient", "--shuffle", "1"],
    "split": ["--split", "train=0.8,val=0.2", "--group-by", "patient", "--shuffle", "3"],
    "split-subset": ["--split", "train=0.8,val=0.2", "--subset", "i < 200"],
}


@pytest.mark.parametrize("way", WAYS)
def test_what_repack_did_is_known(source: Path, tmp_path: Path, way: str) -> None:
    target = tmp_path / "b.h5"
    cli("repack", source, target, "-b", 16, *WAYS[way])
    made = sorted(tmp_path.glob("*.h5"))
    assert len(made) == (2 if "split" in way else 1)
    for path in made:
        same = cli("verify", source, path).said
        assert "bit for bit" in same
        assert "was made of" in same
        copy = tmp_path / f"{path.stem}.lmdb"
        dsprep.convert(path, copy, durable=False)
        cli("verify", copy, path)  # in its own order
        with h5py.File(path, "r+") as file:
            file["i"][1] = 12345
        cli("verify", source, path, code=1)


def test_what_cannot_be_known_is_said(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "b.h5"
    dsprep.repack(source, target, subset=[1, 5, 9], durable=False)
    assert "chosen by an array" in cli("verify", source, target, code=2).said


def test_outputs_that_are_padding(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (2000, 10000), "f4", compression="gzip")
    command = ["repack", tmp_path / "a.h5", tmp_path / "b.h5", "--dry-run"]
    padded = [*command, "--stripe-size", "1MiB"]
    assert "is padding" in cli(*padded, "--ranks", 500, code=2).said
    assert "61.9% of it padding" in cli(*padded, "-b", 10).said


def test_a_field_is_that_of_a_sample(source: Path) -> None:
    with (
        dsprep.open(source) as opened,
        pytest.raises(UsageError, match="the number of a sample"),
    ):
        opened["i"]
