"""Files that no format reads, and directories of them: what they are, and what to do.

The formats are asked first; this is for what none of them knows. Nothing is decoded or unpickled:
the first bytes of a file are looked at, and the last ones where these say more.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from dsprep.errors import FormatError
from dsprep.storage.paths import open_file

HEAD = 4096
"""Bytes of a file that are looked at."""

FILES = 64
"""Files of a directory that are looked at."""

OWN = (
    "have your own code give the samples: dsprep.write(TARGET, samples), as in "
    "examples/write_samples.py, or in many processes dsprep.write(TARGET, items, function=...)"
)


class Kind(NamedTuple):
    """A kind of file.

    Attributes
    ----------
    name
        What such a file is, behind "this is".
    fix
        What to do about it.
    start, at
        Bytes that it has at this offset.
    """

    name: str
    fix: str
    start: bytes = b""
    at: int = 0


def _by(library: str) -> str:
    return f"read it with {library} and {OWN}"


def _media(name: str, start: bytes, at: int = 0) -> Kind:
    return Kind(name, f"name the directory that holds all of them, or {OWN}", start, at)


def _packed(name: str, program: str, start: bytes) -> Kind:
    problem = f"compressed by {name} as a whole, so that no sample has an offset"
    return Kind(problem, f"unpack it: {program} FILE", start)


_SAFE = "dsprep unpickles nothing, as that can run any program; if you trust it, "
_PICKLE = Kind("a pickle", _SAFE + OWN)
_TORCH = Kind("what torch.save writes", _SAFE + OWN)

BY_START = (
    Kind(
        "a Git LFS pointer, which stands for the file",
        "fetch the file itself: git lfs pull",
        b"version https://git-lfs.github.com/spec/",
    ),
    Kind(
        "a MATLAB file of version 5, which is not HDF5",
        "save it in MATLAB with -v7.3, or load it with scipy.io.loadmat and write it with h5py",
        b"MATLAB 5.0 MAT-file",
    ),
    Kind(
        "a Portable Database (PDB, as Silo writes it), which is not HDF5",
        "write it with HDF5 beneath (in Silo: the driver DB_HDF5)",
        b"!<<PDB:",
    ),
    Kind(
        "text in the Protein Data Bank's format",
        "read it with a parser such as Biopython and write its arrays with h5py",
        b"HEADER    ",
    ),
    Kind("HDF4, which is not HDF5", "convert it: h4toh5 IN OUT", b"\x0e\x03\x13\x01"),
    Kind("the metadata of a Parquet dataset", "name its directory, or its files", b"PAR1"),
    Kind("an Arrow IPC file (Feather)", _by("pyarrow.ipc"), b"ARROW1\0\0"),
    Kind("a Feather file of version 1", _by("pyarrow.feather"), b"FEA1"),
    Kind("an Avro file", _by("fastavro"), b"Obj\1"),
    Kind("an ORC file", _by("pyarrow.orc"), b"ORC"),
    Kind("an SQLite database", _by("sqlite3"), b"SQLite format 3\0"),
    Kind("GRIB", "convert it: cdo -f nc4 copy IN OUT; or " + _by("cfgrib"), b"GRIB"),
    Kind("BUFR", _by("eccodes"), b"BUFR"),
    Kind("FITS", _by("astropy.io.fits"), b"SIMPLE  ="),
    Kind("a ROOT file", _by("uproot"), b"root\0\0"),
    Kind("a DICOM image", _by("pydicom"), b"DICM", 128),
    *(Kind("a NIfTI image", _by("nibabel"), b, 344) for b in (b"n+1\0", b"ni1\0")),
    *(Kind("a NIfTI image", _by("nibabel"), b, 4) for b in (b"n+2\0", b"ni2\0")),
    Kind("a WARC archive of web pages", _by("warcio"), b"WARC/"),
    _media("a PNG image", b"\x89PNG\r\n\x1a\n"),
    _media("a JPEG image", b"\xff\xd8\xff"),
    _media("a GIF image", b"GIF8"),
    *(_media("a TIFF image", b) for b in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")),
    _media("a JPEG 2000 image", b"\0\0\0\x0cjP  \r\n\x87\n"),
    _media("a WebP image", b"WEBP", 8),
    _media("WAVE audio", b"WAVE", 8),
    _media("FLAC audio", b"fLaC"),
    _media("a video (MP4)", b"ftyp", 4),
    _media("a video (Matroska)", b"\x1aE\xdf\xa3"),
    _packed("gzip", "gunzip", b"\x1f\x8b"),
    _packed("zstd", "unzstd", b"\x28\xb5\x2f\xfd"),
    _packed("xz", "unxz", b"\xfd7zXZ\0"),
    _packed("bzip2", "bunzip2", b"BZh"),
    _packed("lz4", "unlz4", b"\x04\x22\x4d\x18"),
    Kind("a 7-Zip archive", "unpack it: 7z x FILE", b"7z\xbc\xaf\x27\x1c"),
    _TORCH._replace(start=b"\x80\x02\x8a\x0alfc\x9cF\xf9 j\xa8P\x19"),
    Kind("a PDF document", _by("a parser"), b"%PDF-"),
    Kind("a program, not data", "name the data that it makes", b"\x7fELF"),
)
"""Kinds that their first bytes prove."""

_ZIP = Kind("a ZIP archive", "unpack it, and name the directory: unzip FILE -d DIRECTORY")
_PAGE = Kind("a web page", "the download went wrong, or asks for a login: fetch the file again")
_JSON = Kind("JSON", _by("json"))
_LINES = Kind("JSON lines, a document in each", _by("json"))
_CSV = Kind("a table as text (CSV)", _by("csv or pandas.read_csv"))
_XML = Kind("XML", _by("xml.etree"))

_TEXT_PICKLE = re.compile(
    rb"(?:\(?[ldt]p\d+\n|c[A-Za-z_][\w.]*\n[A-Za-z_]\w*\n|\(?[\]}]q\0|\(i[A-Za-z_][\w.]*\n)"
)
_PAGES = (b"<!doctype html", b"<html")

DIRECTORIES = (
    ("index.json", b'"shards"', "MosaicML's MDS", "streaming.StreamingDataset"),
    ("index.json", b'"chunks"', "litdata's chunks", "litdata.StreamingDataset"),
    ("dataset_info.json", b"", "Hugging Face datasets (Arrow)", "datasets.load_from_disk"),
    ("state.json", b"_data_files", "Hugging Face datasets (Arrow)", "datasets.load_from_disk"),
    ("_versions", b"", "a Lance dataset", "lance"),
    ("__tiledb_group.tdb", b"", "a TileDB group", "tiledb"),
    ("__schema", b"", "a TileDB array", "tiledb"),
)
"""Directories: a member, what it contains, what it then is, and what reads it."""

TABLES = (
    ("_delta_log", "Delta Lake", "deltalake"),
    (".hoodie", "Apache Hudi", "hudi"),
    ("metadata/version-hint.text", "Apache Iceberg", "pyiceberg"),
    ("metadata/*.metadata.json", "Apache Iceberg", "pyiceberg"),
)
"""Directories of tables that keep overwritten rows in files: a member, and what reads them."""


def certain(path: Path, expected: Sequence[str]) -> FormatError | None:
    """Return `refused` if the bytes of a file leave no doubt what it is, else None."""
    known = _certain(path, *_ends(path)) if path.is_file() else None
    return None if known is None else refused(path, expected)


def kind(path: Path) -> Kind | None:
    """Return what a file seems to be, or None."""
    if not path.is_file():
        return None
    head, tail = _ends(path)
    return _certain(path, head, tail) or _text(head) or _binary(path, head, tail)


def refused(path: Path, expected: Sequence[str]) -> FormatError:
    """Return the error for a file that no format reads.

    Parameters
    ----------
    path
        The file.
    expected
        The names of the formats.
    """
    known, names = kind(path), ", ".join(expected)
    if known is not None:
        return FormatError(f"this is {known.name}", where=path, expected=names, fix=known.fix)
    head = _ends(path)[0] if path.is_file() else b""
    if path.is_file() and not head:
        return FormatError("the file is empty", where=path, expected=names)
    problem = "this is not a format that dsprep reads"
    if head and not any(head):
        problem = "the file begins with zeros, as one that was not written completely"
    shown = repr(head[:24])[1:] if head else None
    beginning = None if shown is None else f"a file that begins with {shown}"
    return FormatError(
        problem, where=path, expected=names, found=beginning, fix=OWN if head else None
    )


def check_no_table(directory: Path, expected: Sequence[str]) -> None:
    """Raise `FormatError` if a log in a directory says which rows of its files still count.

    Parameters
    ----------
    directory
        The directory.
    expected
        The names of the formats.
    """
    for member, name, library in TABLES:
        first = directory / member.partition("/")[0]
        if first.exists() and any(directory.glob(member)):
            raise FormatError(
                f"this is a table of {name}: its files also hold rows that were overwritten or "
                "removed since",
                where=directory,
                expected="files of " + ", ".join(expected),
                fix=_by(library),
            )


def nothing_in(directory: Path, files: Sequence[Path], expected: Sequence[str]) -> FormatError:
    """Return the error for a directory without a dataset.

    Parameters
    ----------
    directory
        The directory.
    files
        All its files, which no format reads.
    expected
        The names of the formats.
    """
    expected_files = "files of " + ", ".join(expected)
    for member, words, name, library in DIRECTORIES:
        path = directory / member
        if path.is_dir() or (path.is_file() and words in _ends(path)[0]):
            return FormatError(
                f"this is a directory of {name}",
                where=directory,
                expected=expected_files,
                fix=_by(library),
            )
    inside, fix = "nothing", None
    if files:
        step = -(-len(files) // FILES)
        looked_at = files[::step]
        kinds = Counter(map(_readable, looked_at))
        commonest, count = kinds.most_common(1)[0]
        inside, fix = f"{len(files)} other files, such as {files[0].name}", OWN
        if commonest is not None and count * 2 > len(looked_at):
            share = "mostly " if count < len(looked_at) else "each "
            inside, fix = f"{inside}, {share}{commonest.name}", commonest.fix
    return FormatError(
        "the directory holds no dataset",
        where=directory,
        expected=expected_files,
        found=inside,
        fix=fix,
    )


def _readable(path: Path) -> Kind | None:
    try:
        return kind(path)
    except OSError:
        return None


def _ends(path: Path) -> tuple[bytes, bytes]:
    """Return the first bytes of a file, and its last one."""
    with closing(open_file(path)) as file:
        return file.pread(HEAD, 0), file.pread(1, max(0, file.nbytes - 1))


def _certain(path: Path, head: bytes, tail: bytes) -> Kind | None:
    for known in BY_START:
        if head[known.at :].startswith(known.start):
            if ".tar." in path.name or path.suffix in (".tgz", ".tbz", ".tbz2", ".txz", ".tzst"):
                return known._replace(name=f"a tar archive {known.name}")
            return known
    if head.startswith((b"PK\3\4", b"PK\5\6")):
        return _TORCH if b"/data.pkl" in head[:256] else _ZIP
    if len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5 and tail == b".":
        return _PICKLE
    return None


def _text(head: bytes) -> Kind | None:
    """Return what text is, judged by its first lines."""
    if _TEXT_PICKLE.match(head):
        return _PICKLE
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text[:16].lower().startswith(_PAGES):
        return _PAGE
    if text.startswith(b"<?xml"):
        return _XML
    complete = text.rpartition(b"\n")[0] if len(head) == HEAD else text
    if b"\0" in head or not _is_utf8(head):
        return None
    lines = [line for line in complete.splitlines() if line.strip()]
    if re.match(rb'\{\s*["}]|\[\s*[\[{"\d\]-]|\[\s*(?:true|false|null)\b', text):
        several = len(lines) > 1 and all(map(_is_json, lines[:2]))
        return _LINES if several else _JSON
    for mark in (b",", b"\t", b";"):
        counts = {0 if line.endswith(mark) else line.count(mark) for line in lines[:8]}
        if len(lines) > 1 and len(counts) == 1 and counts != {0}:
            return _CSV
    return None


def _is_utf8(head: bytes) -> bool:
    try:
        head[:-4].decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_json(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict | list)
    except (ValueError, RecursionError):
        return False


def _binary(path: Path, head: bytes, tail: bytes) -> Kind | None:
    """Return what a file without a mark of its own seems to be."""
    suffix, nbytes = path.suffix.lower(), path.stat().st_size
    length = int.from_bytes(head[:8], "little")
    if head[8:9] == b"{" and 2 <= length <= nbytes - 8:
        return Kind("safetensors", _by("safetensors.numpy"))
    if head[:4] == b"\xff\xff\xff\xff" and 0 < int.from_bytes(head[4:8], "little") < nbytes:
        return Kind("an Arrow IPC stream", _by("pyarrow.ipc.open_stream"))
    page = int.from_bytes(head[4:8], "little")
    if suffix == ".beton" or (head[:2] == b"\2\0" and page >= 1 << 16 and not page & (page - 1)):
        return Kind("an FFCV dataset", _by("ffcv.loader.Loader"))
    if suffix == ".mds":
        return Kind("a shard of MosaicML's MDS", _by("streaming.StreamingDataset"))
    if head[:1] and (0x81 <= head[0] <= 0x8F or head[0] in (0xDE, 0xDF)):
        at = {0xDE: 3, 0xDF: 5}.get(head[0], 1)
        size = head[at] - 0xA0 if len(head) > at else 0
        if 1 <= size <= 31 and head[at + 1 : at + 1 + size].isalnum():
            return Kind("MessagePack", _by("msgpack"))
    if tail == b"." and head[:1] in (b"(", b"]", b"}", b"c"):
        return _PICKLE
    return None
