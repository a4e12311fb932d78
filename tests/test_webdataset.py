"""WebDataset: what Python's tarfile and webdataset write is what is read, and damage is named."""

from __future__ import annotations

import io
import subprocess
import tarfile

import numpy as np
import pytest
from format_contract import COUNT, ReadOnlyContract
from support import fails, raw, reading

import dsprep
from dsprep.core.schema import Field, Ragged, Schema
from dsprep.errors import DsprepError, FormatError, SchemaError, UnsupportedError, UsageError
from dsprep.formats.webdataset import headers
from dsprep.source.braces import expand

OPAQUE = Schema(tuple(map(Field.opaque, ("cls", "jpg", "seg.png"))))
TYPED = Schema((Field("x", np.dtype("<f4"), (5, 3)), Field("y", np.dtype(">i8"))))
VARYING = Schema(
    (
        Field.opaque("a"),
        Field("r", np.dtype("<u2"), (None, 3)),
        Field("w", np.dtype(">i8")),
        Field("x", np.dtype("<f4"), (5, 3)),
    )
)
TEXT = {"a.cls": b"7", "a.jpg": b"jpeg", "b.cls": b"8", "b.jpg": b"more"}


def pack(path, members, format=tarfile.USTAR_FORMAT, mtime=1):
    """Write members: names and bytes, or `TarInfo` of what has none."""
    with tarfile.open(path, "w", format=format) as archive:
        for name, data in members:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size, info.mtime = len(data), mtime
            archive.addfile(info, io.BytesIO(data))
    return path


def special(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b""


def values(path, *fields, **options):
    with dsprep.open(path, options=reading(*fields, **options)) as source:
        return [
            {name: bytes(v) if isinstance(v, bytes) else v for name, v in sample.items()}
            for sample in source
        ]


def by_webdataset(path):
    webdataset = pytest.importorskip("webdataset")
    with path.open("rb") as stream:
        members = webdataset.tariterators.tar_file_iterator(stream)
        samples = webdataset.tariterators.group_by_keys({**m, "__url__": ""} for m in members)
        return [
            {"key": s["__key__"].encode(), **{k: v for k, v in s.items() if k[:2] != "__"}}
            for s in samples
        ]


class Archives(ReadOnlyContract):
    """Samples that Python's tarfile writes."""

    format, schema, tar = "webdataset", OPAQUE, tarfile.USTAR_FORMAT
    simple = False

    def write(self, path, batch):
        members = []
        for i in range(COUNT):
            for name, column in batch.items():
                value = column[i] if isinstance(column, Ragged) else column[i : i + 1]
                members.append((f"{self.key(i)}.{name}", raw(value)))
        pack(path, members, self.tar, 0.5)

    def key(self, i):
        return f"train/{i:06d}"


class TestUstar(Archives):
    def key(self, i):
        return f"{'d' * 90}/{i:06d}"


class TestGnu(Archives):
    tar = tarfile.GNU_FORMAT

    def key(self, i):
        return f"{'long' * 60}/{i}" if i % 3 else str(i)


class TestPax(Archives):
    tar = tarfile.PAX_FORMAT

    def key(self, i):
        return f"{'é' * 60}/{i}" if i % 3 == 1 else str(i)


class TestTyped(Archives):
    """Raw values of a fixed type are parts of records."""

    schema, simple = TYPED, True
    open = reading("x:float32[5,3]", "y:>i8")


class TestVarying(Archives):
    """Values of fixed types at no constant distance, and ragged ones."""

    schema = VARYING
    open = reading("a", "r:uint16[None,3]", "w:>i8", "x:float32[5,3]")


# --- archives of all kinds -----------------------------------------------------------------------


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_as_webdataset_takes_them(tmp_path, format):
    names = ["./a.b/1.JPG", "./a.b/1.seg.png", "c d/e.jpg", "c d/e.SEG.png", "é.jpg", "é.seg.png"]
    names += ["../x"[1:] + ".jpg", "./x.seg.png", f"{'p' * 60}/{'q' * 70}.jpg"]
    names += [f"{'p' * 60}/{'q' * 70}.seg.png"]
    members = [(name, bytes([i]) * i * 200) for i, name in enumerate(names)]
    members.insert(2, special("folder", tarfile.DIRTYPE))
    members.insert(5, ("__index__/x.json", b"{}"))
    members.insert(7, special("0.jpg", tarfile.SYMTYPE, "1.jpg"))
    members.insert(7, special("2.jpg", tarfile.LNKTYPE, "1.jpg"))
    path = pack(tmp_path / "a.tar", [*members, ("README", b"text"), ("__meta__", b"")], format)
    found = by_webdataset(path)
    if format != tarfile.USTAR_FORMAT:
        assert values(path, keys_as="key") == found
    for sample in found:
        del sample["key"]
    assert values(path) == found
    with dsprep.open(path) as source:
        assert sorted(source.notes) == [
            "left out 1 members without an extension: README",
            "left out 2 members of metadata: __index__/x.json, ...",
            "left out 2 members that are not files: 2.jpg, ...",
        ]


def test_a_key_in_two_parts(tmp_path):
    path = pack(tmp_path / "a.tar", [(f"{'p' * 60}/{'q' * 70}.jpg", b"x")])
    fails(lambda: values(path, keys_as="key"), UnsupportedError, "two parts")
    assert values(path) == [{"jpg": b"x"}]


def test_chosen_fields(tmp_path):
    path = pack(tmp_path / "a.tar", [*TEXT.items(), ("c.cls", b"9")])
    with pytest.raises(SchemaError, match=r"sample c: .*expected cls, jpg, found cls\).*choose"):
        values(path)
    assert values(path, "label=cls") == [
        {"label": b"7"},
        {"label": b"8"},
        {"label": b"9"},
    ]
    with pytest.raises(SchemaError, match="sample c: a sample lacks a field"):
        values(path, "jpg")
    with pytest.raises(SchemaError, match=r"no field png.*one of cls, jpg"):
        values(path, "png")
    with pytest.raises(UsageError, match="there is a field of this name"):
        values(pack(tmp_path / "b.tar", TEXT.items()), keys_as="jpg")
    with pytest.raises(FormatError, match=r"sample 0.*expected 2 bytes, found 1 bytes"):
        values(path, "cls:int16")
    with pytest.raises(FormatError, match=r"sample 0.*multiple of 2 bytes, found 1 bytes"):
        values(path, "cls:int16[None]")


def test_more_than_samples(tmp_path):
    cases = {
        "a field twice": [("a.jpg", b"1"), ("a.JPG", b"2")],
        "other fields": [("a.jpg", b"1"), ("b.png", b"2")],
        "no samples": [("README", b"1")],
        "leads out": [("../a.jpg", b"1")],
        "out of the archive": [("/a.jpg", b"1")],
        "impossibly many members": [(f"a.{i}", b"") for i in range(300)],
        "not UTF-8": [("a.\udcff", b"")],
    }
    for words, members in cases.items():
        with pytest.raises((FormatError, SchemaError), match=words):
            values(pack(tmp_path / "a.tar", members))


def test_the_end(tmp_path):
    path = pack(tmp_path / "a.tar", TEXT.items())
    whole = path.read_bytes()
    used = len(TEXT) * 1024
    path.write_bytes(whole[: used + 512])
    assert len(values(path)) == 2
    for cut, words in (
        (used - 512 - 1, "within header"),
        (used - 512, "within b.jpg"),
        (used - 512 + 3, "within b.jpg"),
        (used - 1, "within b.jpg"),
        (used - 1024, "has no end"),
        (used, r"has no end.*truncate -s \+1024"),
        (512, "within a.cls"),
    ):
        path.write_bytes(whole[:cut])
        with pytest.raises(FormatError, match=words):
            values(path)
    path.write_bytes(whole + whole)
    with pytest.raises(FormatError, match=rf"offset {len(whole)}: there is more behind the end"):
        values(path)
    path.write_bytes(whole + bytes(777))
    assert len(values(path)) == 2


@pytest.mark.parametrize("folder", ["", "d" * 120 + "/"])
@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_whole_samples_before_a_cut(tmp_path, format, folder):
    members = {f"{folder}{i}.{name}": bytes([i] * 700) for i in range(6) for name in ("x", "y")}
    path = pack(tmp_path / "a.tar", members.items(), format)
    whole = path.read_bytes()
    with tarfile.open(path) as archive:
        ends = [m.offset_data + 1024 for m in archive][1::2]
    for cut in (*range(ends[1], ends[-1], 1536), *(end + 7 for end in ends[1:])):
        path.write_bytes(whole[:cut])
        stop = sum(end <= cut for end in ends)
        with pytest.raises(FormatError, match=f"--samples 0:{stop} "):
            values(path)
        found = [sample["y"] for sample in values(path, stop=stop)]
        assert found == [bytes([i] * 700) for i in range(stop)]
        assert len(values(path, stop=stop - 1)) == stop - 1
        with pytest.raises(FormatError, match=f"--samples 0:{stop} "):
            values(path, stop=stop + 1)


def patched(data, at, value):
    """Return an archive with other bytes in a header, whose checksum is made right again."""
    data = bytearray(data)
    data[at : at + len(value)] = value
    begin = at // 512 * 512
    data[begin + 148 : begin + 156] = b" " * 8
    data[begin + 148 : begin + 156] = b"%06o\0 " % sum(data[begin : begin + 512])
    return bytes(data)


def test_headers_of_other_kinds(tmp_path):
    path = pack(tmp_path / "a.tar", TEXT.items())
    whole = path.read_bytes()
    same = values(path)

    def after(at, value):
        path.write_bytes(patched(whole, at, value))
        return values(path)

    assert after(1024 + 257, bytes(8)) == same  # as before POSIX
    assert after(1024 + 124, b"\x80" + bytes(10) + b"\4") == same  # a size in bytes
    assert after(1024 + 124, b"        4 \0\0") == same
    assert after(1024 + 156, b"\0") == same
    assert after(1024 + 156, b"7") == same
    for at, value, words in (
        (1024 + 124, b"\xff" * 12, "offset 1024: this is not the header"),
        (1024 + 124, b"9" * 11, "offset 1024: this is not the header"),
        (1024 + 124, b"7" * 11, "ends within a.jpg"),
        (1024 + 124, b"\x80" + b"\xff" * 11, "ends within a.jpg"),
        (1024 + 156, b"S", "a sparse file"),
        (1024 + 156, b"M", "begins in another archive"),
        (1024 + 156, b"L", "lacks|other fields|field"),
        (1024 + 156, b"x", "other fields|invalid header"),  # as Python 3.13 says
        (1024 + 156, b"?", "a sample has other fields"),
    ):
        with pytest.raises(DsprepError, match=words):
            after(at, value)
    flipped = bytearray(whole)
    flipped[1024 + 130] ^= 1
    path.write_bytes(flipped)
    fails(lambda: values(path), FormatError, "offset 1024: this is not the header", "checksum")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"22 GNU.sparse.major=1\n", "sparse"),
        (b"13 size=9999\n", "ends within"),
        (b"13 size=-999\n", "not the header"),
        (b"99 size=9\n", "not the header"),
        (b"8 size=9\n", "not the header"),
        (b"999999999999999999 size=9\n", "not the header"),
        (b"14 path=../..\n", "leads out"),
    ],
)
def test_pax_headers(tmp_path, text, words):
    def header(kind, size):
        info = tarfile.TarInfo("x.jpg")
        info.type, info.size = kind, size
        return info.tobuf(tarfile.USTAR_FORMAT)

    for kind in (b"x", b"g"):
        parts = [header(kind, len(text)), text.ljust(512, b"\0"), header(b"0", 4), b"jpeg"]
        path = tmp_path / "a.tar"
        path.write_bytes(b"".join(parts).ljust(4096, b"\0"))
        with pytest.raises(DsprepError, match=words if kind == b"x" else f"{words}|for all"):
            values(path)
    path.write_bytes(path.read_bytes()[:1024])
    fails(lambda: values(path), DsprepError)


def test_small_and_large_members(tmp_path, monkeypatch):
    """Whatever is read at once, the samples are the same; names of another kind in between."""
    rng = np.random.default_rng(5)
    members = []
    for i in range(300):
        key = f"{'n' * 120}{i}" if rng.random() < 0.1 else str(i)
        members.append((f"{key}.cls", b"%d" % i))
        nbytes = int(rng.choice([0, 3, 512, 9000, 200_000], p=[0.3, 0.3, 0.2, 0.18, 0.02]))
        members.append((f"{key}.bin", rng.bytes(nbytes)))
    for format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        path = pack(tmp_path / "a.tar", members, format, 2.5)
        for large in (headers.LARGE, 16 << 10, 4 << 10):
            monkeypatch.setattr(headers, "LARGE", large)
            found = values(path)
            assert [s["bin"] for s in found] == [d for n, d in members if n.endswith("bin")]
            assert [s["cls"] for s in found] == [d for n, d in members if n.endswith("cls")]


# --- brace patterns ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    [
        *("x{1..3}y", "x{01..10}", "x{3..1}", "{1..10..4}", "{-2..2}", "{08..-1}", "{1..x}"),
        *("{a,b}", "{a,b}{1,2}", "{1..2,x}", "{a}", "{}", "{a,b", "a}b", "x{,y}", "a{b,c}{d}e"),
        *("{,}", "{1..2}-{a,b}.{tar,json}"),
    ],
)
def test_braces_as_bash_expands_them(pattern):
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {pattern}-"], capture_output=True, text=True, check=True
    )
    assert expand(f"{pattern}-") == done.stdout.splitlines()


@pytest.mark.parametrize(
    "pattern", ["{1..99999999}", "{0..999}" * 5, "{a,b}" * 40, "{" * 3000, "{" + "," * 10000]
)
def test_braces_are_bounded(pattern):
    if pattern[0] == "{" and "}" not in pattern:
        assert expand(pattern) == [pattern]
    else:
        fails(lambda: expand(pattern), UsageError)


def test_shards_by_braces(tmp_path):
    for k in range(3):
        pack(tmp_path / f"s-{k:06d}.tar", [(f"{k}.txt", b"%d" % k)])
    assert values(str(tmp_path / "s-{000002..000000}.tar")) == [
        {"txt": b"%d" % k} for k in (2, 1, 0)
    ]
    with pytest.raises(FileNotFoundError, match=r"s-000003\.tar"):
        values(str(tmp_path / "s-{000000..000003}.tar"))
    (tmp_path / "{a,b}.tar").write_bytes((tmp_path / "s-000001.tar").read_bytes())
    assert values(str(tmp_path / "{a,b}.tar")) == [{"txt": b"1"}]


def test_members_that_are_apart_are_brought_together_as_advised(tmp_path):
    path = tmp_path / "by kind.tar"
    members = [
        (f"{i:03}.{kind}", f"{kind}{i}".encode()) for kind in ("jpg", "cls") for i in range(5)
    ]
    pack(path, members)
    with pytest.raises(SchemaError, match="order of names") as caught:
        values(path)
    command = caught.value.fix.partition("order of names: ")[2]
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    with dsprep.open(tmp_path / "NEW.tar") as source:
        assert [(s["jpg"], s["cls"]) for s in source] == [
            (f"jpg{i}".encode(), f"cls{i}".encode()) for i in range(5)
        ]


@pytest.mark.parametrize("typed", [False, True])
def test_npy_members_of_one_shape_are_arrays(tmp_path, typed):
    def member(array, header=None):
        data = io.BytesIO()
        np.lib.format.write_array(data, array, version=header)
        return data.getvalue()

    arrays = np.arange(60, dtype=">i2").reshape(5, 4, 3)
    name = "x" if typed else "left.npy"
    options = reading(*(["x:>i2[4,3]"] if typed else []))

    def found(datas):
        path = pack(tmp_path / "a.tar", ((f"{i}.{name}", data) for i, data in enumerate(datas)))
        with dsprep.open(path, options) as source:
            return source.schema[name], source[:][name]

    field, values = found(map(member, arrays))
    assert (field.dtype, field.shape) == (np.dtype(">i2"), (4, 3))
    np.testing.assert_array_equal(values, arrays)
    others = [*map(member, arrays[:-1])]
    for other in (
        arrays[-1].astype("<i2"),
        arrays[-1].reshape(3, 4),
        np.asfortranarray(arrays[-1]),
    ):
        if typed:
            fails(lambda: found([*others, member(other)]), FormatError, "decoded in a transform=")
        else:
            assert found([*others, member(other)])[0].kind == "bytes"
    if not typed:
        path = tmp_path / "a.tar"
        found(map(member, arrays))
        with dsprep.open(path, reading("left.npy:bytes")) as source:
            assert source[3]["left.npy"] == member(arrays[3])
        dsprep.provenance(path)
        with dsprep.Reader(path, 5, shuffle=False) as reader:
            np.testing.assert_array_equal(next(iter(reader))["left.npy"], arrays)
