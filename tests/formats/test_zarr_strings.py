"""Text as Zarr's own strings of varying length: what zarr-python and dsprep read of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import dsprep
from dsprep.cli import app
from dsprep.core.groups import Grouping
from dsprep.core.schema import Field, Schema
from dsprep.errors import UnsupportedError, UsageError
from dsprep.formats import load
from dsprep.formats.options import Compression, WriteOptions

WAYS = {
    "v3": WriteOptions(zarr_strings="vlen"),
    "v2": WriteOptions(zarr_strings="vlen", zarr_format=2),
    "gzip": WriteOptions(zarr_strings="vlen", compress=Compression("gzip"), chunk=10),
    "zstd-v2": WriteOptions(zarr_strings="vlen", compress=Compression("zstd"), zarr_format=2),
    "shards": WriteOptions(zarr_strings="vlen", compress=Compression("blosc"), zarr_shard=6),
    "chunks": WriteOptions(zarr_strings="vlen", chunk=7),
}


def written(path: Path, texts: list[str]) -> Path:
    with h5py.File(path, "w") as file:
        file["t"] = np.array(texts, dtype=h5py.string_dtype())
        file["x"] = np.arange(len(texts) * 3, dtype="<f4").reshape(-1, 3)
        file["t"].attrs["language"] = "en"
    return path


def library(path: Path) -> zarr.Group:
    store = zarr.storage.ZipStore(path, mode="r") if path.suffix == ".zip" else path
    return zarr.open_group(store, mode="r")


@pytest.mark.parametrize("suffix", ["", ".zip"])
@pytest.mark.parametrize("way", WAYS)
def test_zarr_reads_them_as_text(tmp_path: Path, way: str, suffix: str) -> None:
    texts = [f"word {i} " + "\u00e9\U0001f600" * (i % 5) for i in range(1500)]
    texts[3] = texts[1499] = ""
    source = written(tmp_path / "a.h5", texts)
    target = tmp_path / f"a.zarr{suffix}"
    dsprep.convert(source, target, write_options=WAYS[way])
    group = library(target)
    assert list(group["t"][:]) == texts
    assert group["t"].attrs["language"] == "en"
    assert (group["x"][:] == np.arange(4500).reshape(-1, 3)).all()
    with dsprep.open(target) as opened:
        assert str(opened.schema) == "t: str, x: float32[3]"
        assert [opened[i]["t"] for i in (0, 3, 1023, 1024, 1499)] == [
            texts[i] for i in (0, 3, 1023, 1024, 1499)
        ]
        with dsprep.open(source) as origin:
            assert dsprep.verify(origin, opened).same


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=9), max_size=30
    )
)
def test_any_texts_come_back(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    directory = tmp_path_factory.mktemp("any")
    source = written(directory / "a.h5", texts)
    options = WriteOptions(zarr_strings="vlen", chunk=4)
    how = {
        "write_options": options,
        "open_options": dsprep.OpenOptions(sample_axis="first"),
        "durable": False,
    }
    dsprep.convert(source, directory / "a.zarr", **how)
    assert list(library(directory / "a.zarr")["t"][:]) == texts


def test_bytes_do_not_depend_on_who_writes(tmp_path: Path) -> None:
    source = written(tmp_path / "a.h5", [f"{i}" * (i % 50) for i in range(5000)])
    for name, more in (("one", {"workers": 1}), ("four", {"workers": 4})):
        dsprep.convert(source, tmp_path / f"{name}.zarr", write_options=WAYS["v3"], **more)
    with ThreadPoolExecutor(2) as threads:
        dsprep.convert(source, tmp_path / "pool.zarr", write_options=WAYS["v3"], executor=threads)

    def content(name: str) -> dict[str, bytes]:
        root = tmp_path / f"{name}.zarr"
        return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}

    assert content("one") == content("four") == content("pool")
    assert len(content("one")) > 6


def test_they_take_no_memory_beside_large_samples(tmp_path: Path) -> None:
    source = tmp_path / "a.h5"
    with h5py.File(source, "w") as file:
        file["t"] = np.array([f"caption {i}" for i in range(1100)], dtype=h5py.string_dtype())
        file.create_dataset("image", (1100, 50_000), "u1")
    target = tmp_path / "a.zarr"
    dsprep.convert(source, target, write_options=WAYS["v3"], memory="40MiB", durable=False)
    assert library(target)["t"][1099] == "caption 1099"


def test_they_have_no_offsets_and_no_groups(tmp_path: Path) -> None:
    source = written(tmp_path / "a.h5", ["a", "bc"])
    target = tmp_path / "a.zarr"
    dsprep.convert(source, target, write_options=WAYS["v3"])
    with pytest.raises(UsageError, match="t can be read only by the format's own library"):
        list(dsprep.Reader(target, batch_size=1, fields=["t"]))
    schema = Schema((Field("t", np.dtype(np.uint8), (None,), "str"),))
    groups = Grouping(np.array([0, 2]), 1, {"t": np.array([3])})
    with pytest.raises(UnsupportedError, match="leave --zarr-strings out"):
        load("zarr").plan(schema, WAYS["v3"], groups)


def test_the_command_writes_them(tmp_path: Path) -> None:
    source = written(tmp_path / "a.h5", ["one", "two"])
    run = CliRunner().invoke
    command = ["convert", str(source), str(tmp_path / "a.zarr"), "--zarr-strings", "vlen"]
    planned = run(app, [*command, "--dry-run"])
    assert "vlen-utf8" in planned.output
    assert run(app, command).exit_code == 0
    assert list(library(tmp_path / "a.zarr")["t"][:]) == ["one", "two"]
    other = ["convert", str(source), str(tmp_path / "a.lmdb"), "--zarr-strings", "vlen"]
    refused = run(app, other)
    assert refused.exit_code == 2
    assert "zarr-strings" in refused.output
