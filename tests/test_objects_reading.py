"""Datasets in object stores: Readers, caches, processes and commands, and what they ask for."""

from __future__ import annotations

import json
import multiprocessing
import re
import tarfile
from io import BytesIO

import h5py
import numpy as np
import pytest

pytest.importorskip("obstore")

from object_server import KEYS, forget, serving
from support import cli, fails

import dsprep
from dsprep.errors import LocatedWarning, UsageError
from dsprep.reader.defaults import units_ahead
from dsprep.sidecar.sidecar import Sidecar
from dsprep.storage import paths
from dsprep.storage.objects.requests import counters

COUNT = 640
IDS = np.arange(COUNT)
X = np.random.default_rng(7).integers(0, 1 << 30, (COUNT, 125)).astype("<i4")
X[:, 0] = IDS


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """One dataset, contiguous and in groups, on the disk."""
    folder = tmp_path_factory.mktemp("local")
    with h5py.File(folder / "plain.h5", "w") as file:
        file["x"], file["id"] = X, IDS
    dsprep.repack(folder / "plain.h5", folder / "g.h5", buffer_size=32, durable=False)
    return folder


@pytest.fixture(scope="module")
def running():
    with serving() as server:
        yield server


@pytest.fixture
def server(running, local):
    forget()
    running.clear()
    for name in ("plain.h5", "g.h5"):
        running.put(f"/b/{name}", (local / name).read_bytes())
    yield running
    forget()


@pytest.fixture
def url(server, local):
    """The dataset in groups, with a sidecar that names its ETag."""
    server.put("/b/g.h5.dsprep.json", (local / "g.h5.dsprep.json").read_bytes())
    dsprep.provenance("s3://b/g.h5")
    return "s3://b/g.h5"


class Asked:
    """Counts what is asked of the store within a block, from a store that knows nothing yet."""

    def __enter__(self):
        paths._stores.pop("s3", None)
        self._before = dict(counters)
        return self

    def __getattr__(self, name):
        return counters[name] - self._before[name]

    def __exit__(self, *_):
        self.__dict__.update({name: getattr(self, name) for name in self._before})


def ids_of(reader):
    return sorted(int(i) for batch in reader for i in batch["id"])


# --- the Reader ----------------------------------------------------------------------------------


def test_units_are_read_ahead_by_bytes(url, local):
    assert [units_ahead(mib << 20) for mib in (1, 5, 64, 512)] == [31, 26, 2, 1]
    for options, threads in (({}, 31), ({"buffers": 4}, 3), ({"io_threads": 2}, 2)):
        with dsprep.Reader(url, 32, **options) as reader:
            assert (reader.threads, reader._settings.buffers) == (threads, threads + 1)
    with dsprep.Reader(local / "g.h5", 32) as reader:
        assert reader.threads <= 4


@pytest.mark.parametrize(
    "options",
    [{}, {"shuffle": "global"}, {"subset": "id < 100"}, {"verify": True}, {"transform": dict}],
    ids=str,
)
def test_batches_are_those_of_the_file(url, local, options):
    def taken(path):
        with dsprep.Reader(path, 32, seed=5, epochs=1, **options) as reader:
            return [{name: np.asarray(v).copy() for name, v in b.items()} for b in reader]

    found, expected = taken(url), taken(local / "g.h5")
    assert len(found) == len(expected) > 1
    for a, b in zip(found, expected, strict=True):
        assert all((a[name] == b[name]).all() for name in ("x", "id"))


def test_an_engine_that_needs_a_file_is_refused(url):
    fails(lambda: dsprep.Reader(url, 32, engine="direct"), UsageError, "not a file of")


# --- caches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [{}, {"mini_epochs": 4, "repeats": 2}], ids=["epoch", "mini"])
def test_what_is_in_the_cache_is_not_asked_for_again(url, tmp_path, parts):
    with dsprep.Reader(url, 32, cache=tmp_path / "c", epochs=3, **parts) as reader:
        passes = 8 if parts else 1
        with Asked() as first:
            for _ in range(passes):
                for _ in reader:
                    pass
        assert COUNT * 508 <= first.nbytes < 1.3 * COUNT * 508
        if not parts:
            with Asked() as second:
                assert ids_of(reader) == [*range(COUNT)]
            assert (second.requests, second.nbytes, second.other) == (0, 0, 0)
    with Asked() as third, dsprep.Reader(url, 32, cache=tmp_path / "c", epochs=1) as reader:
        if not parts:
            assert ids_of(reader) == [*range(COUNT)]
    assert third.nbytes < 5000  # of the sidecar


def test_another_version_is_not_read_from_the_cache(url, server, local, tmp_path):
    with dsprep.Reader(url, 32, cache=tmp_path / "c", epochs=1) as reader:
        assert ids_of(reader) == [*range(COUNT)]
    data = bytearray((local / "g.h5").read_bytes())
    at = data.index(X[0].tobytes())
    data[at] ^= 1
    server.put("/b/g.h5", data)
    with Asked():
        dsprep.provenance(url)
    with dsprep.Reader(url, 32, cache=tmp_path / "c", epochs=1) as reader:
        found = next(b["x"][b["id"] == 0] for b in reader if (b["id"] == 0).any())
    assert found[0][0] == X[0][0] ^ 1


# --- processes -----------------------------------------------------------------------------------


def _count(url):
    with dsprep.Reader(url, 32, epochs=1) as reader:
        return len(ids_of(reader))


def _in_child(pipe, url):
    try:
        pipe.send(_count(url))
    except UsageError as error:
        pipe.send(str(error))


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_fork_is_told_and_other_children_read(url, method):
    _count(url)
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context(method)
    child = context.Process(target=_in_child, args=(theirs, url))
    child.start()
    assert ours.poll(60), "it hangs"
    answer = ours.recv()
    child.join(600)
    if method == "fork":
        assert "multiprocessing_context='forkserver'" in answer
        assert "changed" not in answer
    else:
        assert answer == COUNT


def test_processes_write_what_threads_write(server, tmp_path):
    done = dsprep.convert("s3://b/plain.h5", tmp_path / "a.h5", durable=False)
    run("convert", "s3://b/plain.h5", tmp_path / "b.h5", "--executor", "processes", "-j", "1")
    assert done.samples == COUNT
    run("verify", tmp_path / "a.h5", tmp_path / "b.h5")
    run("verify", "s3://b/plain.h5", tmp_path / "b.h5", "--executor", "processes", "-j", "1")


# --- the command line ----------------------------------------------------------------------------


def run(*words, code=0):
    done = cli(*words, code=code)
    assert not any(secret in done.said for secret in KEYS.values())
    return done.json() if "--json" in words else done.said


def test_commands_take_urls(url, local, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert re.search(r"an epoch +about 20 GET requests", run("inspect", url))
    assert run("inspect", url, "--json")["epoch_requests"] == 20
    assert run("inspect", url, "--json")["asked"]["requests"] > 0
    assert "asks          about 20 GET requests" in run("audit", url, "-P", 2, "-M", 8)
    assert run("audit", url, "-P", 2, "-M", 8, "--json")["requests"] == 20
    rows = run("provenance", url, "--locate", "3", "--json")
    with Sidecar.open(local / "g.h5") as sidecar:
        assert [(r["offset"], r["length"]) for r in rows] == [
            (e.offset, e.length) for e in sidecar.extents([3])
        ]
    assert "i *" in run("provenance", url, "--show")
    assert "valid" in run("provenance", url, "--check", "--full")
    run("provenance", url, "--checksums", "--out", "x.dsprep.json")
    assert "valid" in run("provenance", url, "--out", "x.dsprep.json", "--check")
    words = ("--tier", "1MB", "-M", 8, "--compute", "1ms", "--storage", "cori", "-E", 2)
    assert "mini-epochs" in run("plan", url, *words)
    run("audit", url, "-P", 2, "-M", 8, "--sidecar", f"{url}.dsprep.json")
    told = run("audit", url, "-P", 2, "-M", 8, "--sidecar", "ftp://b", code=2)
    assert "not a kind of store" in told
    run("stage", url, "-P", 1, "--ranks-per-node", 1, "-M", 8, "--to", "cache", "--node", 0)
    assert "s3://b/g.h5" in run("cache", "list", "cache")
    run("convert", url, "out.zarr")
    assert "same" in run("verify", url, "out.zarr")
    run("repack", "s3://b/plain.h5", "out.h5", "--buffer-size", 8)
    assert "same" in run("verify", "out.h5", local / "plain.h5")


def test_a_look_at_records_asks_for_few_of_them(server, tmp_path):
    lengths = np.arange(400) % 7
    with h5py.File(tmp_path / "r.h5", "w") as file:
        x = file.create_group("x")
        x["first"], x["count"] = np.cumsum(lengths) - lengths, lengths
        x["values"] = np.zeros(lengths.sum(), "f4")
    dsprep.convert(tmp_path / "r.h5", tmp_path / "r.tfrecord", durable=False)
    server.put("/b/r.tfrecord", (tmp_path / "r.tfrecord").read_bytes())
    with Asked() as asked:
        assert "length  0 to 6" in run("inspect", "s3://b/r.tfrecord")
    assert asked.requests < 20


def test_a_bench_reads_from_the_store(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = run("bench", "read", url, "-r", 1, "--warm")
    assert "failed" not in output
    assert "one sample at a time are left out" in output
    assert all(name in output for name in ("pread-limit", "group", "group-db", "dsprep"))


@pytest.mark.parametrize("habit", ["", "bare-list"])
@pytest.mark.parametrize("name", ["s3://b/p*.h5", "s3://b/{plain,none}.h5", "s3://b/**/pl*.h5"])
def test_names_that_mean_several_objects(server, local, name, habit):
    server.put("/b/d/plain.h5", (local / "plain.h5").read_bytes())
    server.set[habit] = 1.0
    if "none" in name:
        assert "No such file" in run("inspect", name, code=1)
    else:
        with dsprep.open(name) as source:
            assert len(source) == COUNT * (2 if "**" in name else 1)
            assert (source[5:7]["id"] == [5, 6]).all()


@pytest.mark.parametrize("name", ["plain.h5", "*.h5", "d", "@s3://none/list"])
def test_a_bucket_that_is_missing_is_said_to_be(server, name):
    name = name if "://" in name else f"s3://none/{name}"
    assert "no such bucket" in run("inspect", name, code=1)


def test_an_object_is_read_where_a_listing_is_forbidden(server, url):
    server.set["private"] = 1.0
    for name in (url, "s3://b/plain.h5"):
        with dsprep.open(name) as source:
            assert (source[5:7]["id"] == [5, 6]).all()


def test_lists_and_directories(server, local, tmp_path):
    data = (local / "plain.h5").read_bytes()
    for name in ("/b/d/1.h5", "/b/d/2.h5"):
        server.put(name, data)
    (tmp_path / "list.txt").write_text("s3://b/d/1.h5\ns3://b/d/2.h5\ns3://b/plain.h5\n")
    server.put("/b/d/list.txt", b"1.h5\n2.h5\ns3://b/plain.h5\n")
    for name, files in (
        ("s3://b/d", 2),
        (f"@{tmp_path}/list.txt", 3),
        ("@s3://b/d/list.txt", 3),
        (f"{server.endpoint}/b/plain.h5", 1),
    ):
        with dsprep.open(name) as source:
            assert len(source) == files * COUNT
            assert (source[5:7]["id"] == [5, 6]).all()


@pytest.mark.parametrize("line", ["/tmp/x.h5", "http://h/x.h5", "s3://c/x.h5", "../../c/x.h5"])
def test_a_list_of_a_store_names_only_what_is_there(server, line):
    server.put("/b/d/list.txt", f"../plain.h5\n{line}\n".encode())
    with pytest.raises(UsageError, match=r"s3://b/d/list.txt|\.\. or"):
        dsprep.open("@s3://b/d/list.txt")


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_other_endpoints_take_http(server, scheme, monkeypatch, tmp_path):
    key = {"gcs_base_url": server.endpoint, "disable_oauth": True}
    key |= dict.fromkeys(("private_key", "private_key_id", "client_email"), "")
    (tmp_path / "key.json").write_text(json.dumps(key))
    names = "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_BASE_URL", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"
    for name in names:
        monkeypatch.setenv(name, server.endpoint)
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "key.json"))
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "b")
    monkeypatch.setenv("AZURE_SKIP_SIGNATURE", "true")
    assert "640" in run("inspect", f"{scheme}://b/plain.h5")


# --- what is asked for ---------------------------------------------------------------------------


def test_hdf5_is_located_by_few_requests(server):
    for name in ("plain.h5", "g.h5"):
        with Asked() as made:
            dsprep.provenance(f"s3://b/{name}")
        assert made.requests <= 3
        assert made.nbytes < 1 << 20
        assert made.other <= 5
        with Asked() as made, Sidecar.open(f"s3://b/{name}") as sidecar:
            assert len(sidecar) == COUNT
        assert (made.requests, made.other) == (1, 0)


def test_tfrecord_is_read_through_once(server, tmp_path):
    """Records of any size up to some MB, alike or not, with the sidecar of before, too."""
    for name, sizes in {"a": [150_000] * 100, "b": range(130_000, 180_000, 500)}.items():
        records = ({"x": bytes(n), "y": i} for i, n in enumerate(sizes))
        dsprep.write(tmp_path / "t.tfrecord", records, length=100, durable=False, overwrite=True)
        server.put(f"/b/{name}.tfrecord", (tmp_path / "t.tfrecord").read_bytes())
        for _ in range(2):
            with Asked() as made:
                dsprep.provenance(f"s3://b/{name}.tfrecord")
            assert made.requests <= 10
            assert made.nbytes < 1.1 * (tmp_path / "t.tfrecord").stat().st_size
        with Sidecar.open(f"s3://b/{name}.tfrecord") as sidecar:
            assert (sidecar.read([99, 3])["y"] == [99, 3]).all()


def test_a_sample_of_fields_that_lie_apart_takes_one_round_trip(server, tmp_path):
    with h5py.File(tmp_path / "f.h5", "w") as file:
        for k in range(6):
            file[f"f{k}"] = np.arange(40_000).reshape(40, 1000) + k
    server.put("/b/f.h5", (tmp_path / "f.h5").read_bytes())
    dsprep.provenance("s3://b/f.h5", dsprep.OpenOptions(sample_axis="first"))
    with Sidecar.open("s3://b/f.h5") as sidecar:
        server.stat["most"], server.set["latency"] = 0, 0.05
        batch = sidecar.read([7])
    assert all((batch[f"f{k}"] == np.arange(7000, 8000) + k).all() for k in range(6))
    assert server.stat["most"] == 6


def test_a_tree_is_listed_at_once(server, tmp_path):
    run("convert", "s3://b/plain.h5", tmp_path / "t.zarr")
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(str(tmp_path / "z.zarr"), mode="w", zarr_format=3)
    group.create_array("x", data=X, chunks=(8, 125), shards=(32, 125))
    group.create_array("id", data=IDS, chunks=(32,))
    files = [p for p in (tmp_path / "z.zarr").rglob("*") if p.is_file()]
    assert len(files) > 40
    for file in files:
        server.put(f"/b/{file.relative_to(tmp_path)}", file.read_bytes())
    with Asked() as made:
        dsprep.provenance("s3://b/z.zarr")
    assert made.other <= 8  # two of them list it
    assert made.requests <= 20 + 8  # the index of each shard
    assert made.nbytes < 400_000
    with Sidecar.open("s3://b/z.zarr") as sidecar:
        assert (sidecar.read([1, 639])["x"] == X[[1, 639]]).all()


def test_listings_do_not_outlive_what_is_written(server, tmp_path):
    (tmp_path / "x").write_bytes(b"2")
    server.put("/b/t/a", b"1")
    root = paths.as_path("s3://b/t")
    assert [p.name for p in root.iterdir()] == ["a"]
    assert not (root / "x").exists()
    root.store.put("b/t/x", tmp_path / "x", overwrite=False)
    assert (root / "x").is_file()
    assert {p.name for p in root.iterdir()} == {"a", "x"}


def test_formats_without_a_signature_are_not_read_to_find_that_out(server, tmp_path):
    with tarfile.open(tmp_path / "d.tar", "w") as target:
        for i in range(4):
            info = tarfile.TarInfo(f"{i}.bin")
            info.size = 1 << 20
            target.addfile(info, BytesIO(bytes(1 << 20)))
    np.save(tmp_path / "x.npy", np.zeros((4, 1 << 20), np.uint8))
    for name, most in (("d.tar", 5 << 20), ("x.npy", 1 << 20)):
        server.put(f"/b/{name}", (tmp_path / name).read_bytes())
        with Asked() as made, dsprep.open(f"s3://b/{name}") as source:
            assert len(source) == 4
        assert made.nbytes < most


# --- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("AWS_ENDPOINT_URL", url) for url in ("", "nonsense", "http://", "http://h:99999")),
        ("AWS_ENDPOINT_URL", "http://user:secret-secret@127.0.0.1:1"),
        ("AWS_ENDPOINT_URL", "127.0.0.1:9000"),
        ("AWS_SESSION_TOKEN", "secret-secret\n"),
    ],
)
def test_an_environment_that_cannot_be_is_one_line_without_secrets(
    server, local, monkeypatch, name, value
):
    monkeypatch.setenv(name, value)
    for use in (dsprep.open, lambda url: dsprep.convert(local / "g.h5", f"{url}.zarr")):
        with pytest.raises(UsageError, match=name) as caught:
            use("s3://b/plain.h5")
        assert "secret" not in str(caught.value)


def test_who_is_refused_is_told_how_to_ask(server, monkeypatch):
    server.set["denied"] = 1.0
    text = run("inspect", "s3://b/plain.h5", code=1)
    assert "AWS_SKIP_SIGNATURE=true" in text
    assert "AWS_REQUEST_PAYER=true" in text


def test_names_that_no_object_has_and_files_of_several_stores(server, local):
    for key in ("a/../b.h5", "a\nb.h5"):
        fails(lambda: dsprep.Reader(f"s3://b/{key}", 8), UsageError, "is not read")
    for opened in (dsprep.open, lambda paths: dsprep.Reader(paths, 8)):
        with pytest.raises(UsageError, match="different stores"):
            opened(["s3://b/plain.h5", str(local / "g.h5")])


def test_a_web_server_needs_no_sidecar(server):
    with pytest.warns(LocatedWarning, match="only read"):
        reader = dsprep.Reader(f"{server.endpoint}/b/plain.h5", 64)
    with reader:
        assert ids_of(reader) == [*IDS]
