"""`dsprep verify` knows what repack did to the order, and notices what else is different."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner

import dsprep
from dsprep.cli import app
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
    "shuffled": ["--shuffle", "7"],
    "duplicated": ["--shuffle", "7", "--duplicate", "2"],
    "subset": ["--subset", "i % 3 == 0 and word != 'w9'"],
    "shuffled-subset": ["--subset", "train of train=0.5,val=0.5 by patient", "--shuffle", "1"],
    "split": ["--split", "train=0.8,val=0.2", "--group-by", "patient", "--shuffle", "3"],
    "split-subset": ["--split", "train=0.8,val=0.2", "--subset", "i < 200"],
}


@pytest.mark.parametrize("way", WAYS)
def test_what_repack_did_is_known(source: Path, tmp_path: Path, way: str) -> None:
    run = CliRunner().invoke
    target = tmp_path / "b.h5"
    command = ["repack", str(source), str(target), "-b", "16", *WAYS[way]]
    assert run(app, command).exit_code == 0
    made = sorted(tmp_path.glob("*.h5"))
    assert len(made) == (2 if "split" in way else 1)
    for path in made:
        same = run(app, ["verify", str(source), str(path)])
        assert same.exit_code == 0, same.output
        assert "bit for bit" in same.output
        assert "was made of" in same.output
        copy = tmp_path / f"{path.stem}.lmdb"
        dsprep.convert(path, copy, durable=False)
        assert run(app, ["verify", str(copy), str(path)]).exit_code == 0  # in its own order
        with h5py.File(path, "r+") as file:
            file["i"][1] = 12345
        refused = run(app, ["verify", str(source), str(path)])
        assert refused.exit_code == 1


def test_what_cannot_be_known_is_said(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "b.h5"
    dsprep.repack(source, target, subset=[1, 5, 9], durable=False)
    result = CliRunner().invoke(app, ["verify", str(source), str(target)])
    assert result.exit_code == 2
    assert "chosen by an array" in result.output


def test_outputs_that_are_padding_or_no_longer_compressed(tmp_path: Path) -> None:
    run = CliRunner().invoke
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (2000, 10000), "f4", compression="gzip")
    command = ["repack", str(tmp_path / "a.h5"), str(tmp_path / "b.h5"), "--dry-run"]
    assert "80.1 MB: the source is compressed (gzip:4)" in run(app, command).output
    assert "is compressed" not in run(app, [*command, "--compress", "gzip"]).output
    padded = [*command, "--stripe-size", "1MiB"]
    refused = run(app, [*padded, "--ranks", "500"])
    assert (refused.exit_code, "is padding" in refused.output) == (2, True)
    assert "note: 62% of the output is padding" in run(app, [*padded, "-b", "10"]).output
    assert "is padding (" not in run(app, [*padded, "-b", "26"]).output


def test_a_field_is_that_of_a_sample(source: Path) -> None:
    with dsprep.open(source) as opened, pytest.raises(UsageError, match="no number of a sample"):
        opened["i"]
