"""Functions of a sample: the same on any threads and ranks, in memory that is used again."""

from __future__ import annotations

import io
import itertools
import mmap
import resource
import struct
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from support import fails

import dsprep
from dsprep import decode
from dsprep.core.schema import Array
from dsprep.errors import ItemError, MissingExtra, SchemaError, UsageError
from dsprep.reader.each import generator
from dsprep.reader.mini_epochs import derive

cv2 = pytest.importorskip("cv2")
Image = pytest.importorskip("PIL.Image")

N = 230


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("each")
    with h5py.File(directory / "a.h5", "w") as file:
        file["i"] = np.arange(N)
        file["x"] = np.arange(N * 6, dtype="f4").reshape(N, 2, 3)
        file["word"] = np.array(["w" * (i % 4) for i in range(N)], object)
        rows = file.create_dataset("rows", (N,), h5py.vlen_dtype("i4"))
        for i in range(N):
            rows[i] = np.arange(i % 5)
    dsprep.repack(directory / "a.h5", directory / "g.h5", buffer_size="25", durable=False)
    return directory / "g.h5"


def noisy(sample: dict[str, Any], out: dict[str, Array], rng: np.random.Generator) -> None:
    assert isinstance(sample["word"], str)
    out["noise"][:] = rng.random(4)
    out["sum"][()] = sample["x"].sum() + len(sample["word"]) + sample["rows"].sum()


OUT = {"noise": ("f8", (4,)), "sum": ("f4", ())}


def by_sample(batches: Any) -> dict[int, tuple[list[float], float]]:
    found = {}
    for batch in batches:
        assert list(batch) == ["i", "x", "noise", "sum"]
        for i, noise, total in zip(batch["i"], batch["noise"], batch["sum"], strict=True):
            assert int(i) not in found
            found[int(i)] = noise.tolist(), float(total)
    return found


def test_random_numbers_are_those_of_the_sample(data: Path) -> None:
    def reader(**options: Any) -> dsprep.Reader:
        more = {"batch_size": 16, "seed": 3, **options}
        return dsprep.Reader(data, transform=dsprep.each(noisy, OUT, threads=2), **more)

    with reader() as one:
        expected, second = by_sample(one), by_sample(one)
    assert sorted(expected) == list(range(N))
    for epoch, found in enumerate((expected, second)):  # of epoch and sample alone
        for i, (noise, _) in found.items():
            assert noise == generator(derive(3, "each"), epoch, i).random(4).tolist()
    totals = np.arange(N * 6).reshape(N, 6).sum(1)
    assert all(expected[i][1] == totals[i] + i % 4 + sum(range(i % 5)) for i in range(N))
    with reader(batch_size=7, shuffle="global", io_threads=1) as other:
        assert by_sample(other) == expected
    with reader(seed=4) as other:
        assert by_sample(other) != expected
    for threads in (1, 5):
        transform = dsprep.each(noisy, OUT, threads=threads)
        with dsprep.Reader(data, 16, seed=3, transform=transform) as other:
            assert by_sample(other) == expected
    ranks = {}
    for rank in range(2):
        with reader(rank=rank, world_size=2) as other:
            first = by_sample(itertools.islice(other, 3))
            state = other.state_dict()
        with reader(rank=rank, world_size=2) as other:
            other.load_state_dict(state)
            ranks |= first | by_sample(other)
    assert ranks == expected
    with reader(subset=[3, 4, 200]) as other:
        assert by_sample(other) == {i: expected[i] for i in (3, 4, 200)}


def test_a_batch_is_divided_among_threads_and_in_the_memory_of_the_reader(data: Path) -> None:
    both, began, memories = threading.Barrier(2), threading.local(), []
    first: list[int] = []

    def meeting(sample: dict[str, Any], out: dict[str, Array], rng: object) -> None:
        if not hasattr(began, "here"):
            began.here = True
            first.append(int(sample["i"]))
            both.wait(60)  # broken if one thread does the whole batch
        out["noise"][:] = 1

    def allocate(nbytes: int) -> mmap.mmap:
        memories.append(mmap.mmap(-1, nbytes))
        return memories[-1]

    transform = dsprep.each(meeting, {"noise": ("f8", (4,))}, threads=2)
    with dsprep.Reader(data, 64, transform=transform) as reader:
        reader.allocate = allocate
        batch = next(iter(reader))
        assert set(first) <= set(batch["i"].tolist())
        at = batch["noise"].ctypes.data
        starts = [np.frombuffer(m, np.uint8).ctypes.data for m in memories]
        assert any(s <= at < s + len(m) for s, m in zip(starts, memories, strict=True))
        assert (batch["noise"] == 1).all()


def test_fields_that_are_kept(data: Path) -> None:
    kept = dsprep.each(noisy, OUT, keep=("rows", "i"))
    with dsprep.Reader(data, 16, transform=kept) as reader:
        for batch in reader:
            assert list(batch) == ["i", "rows", "noise", "sum"] or list(batch)[:2] == ["rows", "i"]
            assert [len(r) for r in batch["rows"]] == (batch["i"] % 5).tolist()
    with pytest.raises(SchemaError, match="no field z"):
        dsprep.Reader(data, 16, transform=dsprep.each(noisy, OUT, keep=("z",)))
    fails(lambda: dsprep.each(lambda batch: batch, OUT), UsageError, "each ", "sample, out, rng")
    with pytest.raises(UsageError, match=r"image.*dsprep\.each"):
        dsprep.Reader(data, 16, transform=dsprep.decode.image(8))


def test_errors_name_the_sample(data: Path) -> None:
    def broken(sample: dict[str, Any], out: dict[str, Array], rng: object) -> None:
        if sample["i"] == 77:
            raise ZeroDivisionError("by accident")

    with dsprep.Reader(data, 16, transform=dsprep.each(broken, OUT)) as reader:
        with pytest.raises(ItemError, match=r"sample 77 cannot .* by accident") as caught:
            list(reader)
        assert str(data) in str(caught.value)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert not [t for t in threading.enumerate() if t.name.startswith("dsprep-transform")]

    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def silent(*_: object) -> None:
        raise Silent

    with (
        dsprep.Reader(data, 16, transform=dsprep.each(silent, OUT)) as reader,
        pytest.raises(ItemError, match=r"sample \d+ cannot .* Silent"),
    ):
        list(reader)
    for out in (None, {}, {"a": "u1"}, {"a": ("u1", (-1,))}, {"a": (object, (1,))}):
        fails(lambda: dsprep.each(broken, out), UsageError, "out is")


def test_transforms_follow_one_another(data: Path) -> None:
    def doubled(batch: Any) -> Any:
        return {**batch, "x": batch["x"] * 2}

    def again(sample: dict[str, Any], out: dict[str, Array], rng: np.random.Generator) -> None:
        out["y"][:] = sample["noise"][:2] + rng.random(2)

    def renamed(batch: Any, rng: np.random.Generator) -> Any:
        return {"first": batch["i"], "total": batch["sum"], "y": batch["y"], "r": rng.random()}

    second = dsprep.each(again, {"y": ("f8", (2,))})
    every = [doubled, dsprep.each(noisy, OUT, threads=2), second, renamed]

    def opened() -> dsprep.Reader:
        return dsprep.Reader(data, 16, seed=3, transform=every)

    with opened() as reader:
        found = list(itertools.islice(reader, 4))
        state = reader.state_dict()
    with opened() as reader:
        reader.load_state_dict(state)
        found += list(reader)
    with dsprep.Reader(data, 16, seed=3) as reader:
        plain = list(reader)
    assert len({batch["r"] for batch in found}) == len(found) == len(plain)
    for batch, before in zip(found, plain, strict=True):
        assert (batch["first"] == before["i"]).all()
        extra = [len(w) + r.sum() for w, r in zip(before["word"], before["rows"], strict=True)]
        np.testing.assert_allclose(batch["total"], 2 * before["x"].sum((1, 2)) + extra)
        for i, y in zip(batch["first"].tolist(), batch["y"], strict=True):
            first = generator(derive(3, "each", 1), 0, i).random(4)
            later = generator(derive(3, "each", 2), 0, i).random(2)
            np.testing.assert_array_equal(y, first[:2] + later)
    with pytest.raises(UsageError, match="transform is"):
        dsprep.Reader(data, 16, transform=[doubled, 3])  # type: ignore[list-item]
    assert not [t for t in threading.enumerate() if t.name.startswith("dsprep-transform")]


# --- images ------------------------------------------------------------------------------------


def gradient(height: int, width: int) -> Array:
    """Return an image whose red rises downwards, and whose green to the right."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = np.linspace(0, 255, height)[:, None]
    pixels[..., 1] = np.linspace(0, 255, width)
    return pixels


def jpeg(pixels: Array) -> bytes:
    return cv2.imencode(".jpg", pixels[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 95])[1].tobytes()


def gathered(samples: list[dict[str, Any]], rng: np.random.Generator) -> dict[str, Any]:
    assert all(isinstance(sample["word"], str) for sample in samples)
    rows = max(len(sample["rows"]) for sample in samples)
    return {
        "i": [int(sample["i"]) for sample in samples],
        "word": [sample["word"] for sample in samples],
        "rows": np.array([np.pad(s["rows"], (0, rows - len(s["rows"]))) for s in samples]),
        "x": np.stack([sample["x"] for sample in samples]),
        "noise": rng.random(),
    }


def test_collate_takes_samples(data: Path) -> None:
    with dsprep.Reader(data, 16, seed=3) as plain:
        expected = list(plain)
    noise = []
    for threads in (1, 4):
        with dsprep.Reader(data, 16, seed=3, collate=gathered, io_threads=threads) as reader:
            found = list(reader)
        noise.append([batch["noise"] for batch in found])
        for batch, before in zip(found, expected, strict=True):
            assert batch["i"] == before["i"].tolist()
            assert batch["word"] == list(before["word"])
            assert (batch["x"] == before["x"]).all()
            for row, rows in zip(batch["rows"], before["rows"], strict=True):
                assert row.tolist() == [*rows, *[0] * (len(row) - len(rows))]
    assert noise[0] == noise[1]
    assert len({*noise[0]}) == len(noise[0])
    with dsprep.Reader(data, 16, seed=3, collate=gathered) as reader:
        begun = [batch["noise"] for batch in itertools.islice(reader, 5)]
        state = reader.state_dict()
    with dsprep.Reader(data, 16, seed=3, collate=gathered) as reader:
        reader.load_state_dict(state)
        assert begun + [batch["noise"] for batch in reader] == noise[0]


@pytest.fixture(params=["opencv", "pillow"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(decode, "_decoder", lambda: request.param)
    return str(request.param)


def decoded(f: decode.image, data: bytes, seed: int = 0) -> Array:
    out = {n: np.zeros(shape, dtype) for n, (dtype, shape) in f.out.items()}
    f({"jpg": data, "i": 3}, out, np.random.default_rng(seed))
    return out["image"]


@pytest.mark.parametrize("size", [(400, 300), (2000, 1500)])
@pytest.mark.parametrize("kind", ["jpg", "png"])
def test_crops(decoder: str, size: tuple[int, int], kind: str) -> None:
    pixels = gradient(*size)
    data = jpeg(pixels) if kind == "jpg" else cv2.imencode(".png", pixels[..., ::-1])[1].tobytes()
    whole = decoded(decode.image((100, 80), crop=None, layout="hwc"), data)
    assert whole.shape == (100, 80, 3)
    assert np.abs(whole.astype(int) - gradient(100, 80)).max() < 9
    center = decoded(decode.image(64), data)
    assert center.shape == (3, 64, 64)
    side = min(size) * 224 / 256
    for axis, channel in ((0, 0), (1, 1)):
        low, high = (128 * (1 + sign * side / size[axis]) for sign in (-1, 1))
        line = center[channel].mean(1 - axis)
        assert abs(line[0] - low) < 8
        assert abs(line[-1] - high) < 8
    f = decode.image(64, crop="random")
    for seed in range(20):
        crop = decoded(f, data, seed)
        top, left, h, w = f.box(*size, np.random.default_rng(seed).random(23))
        assert 0 <= top <= top + h <= size[0]
        assert 0 <= left <= left + w <= size[1]
        assert 0.07 < h * w / (size[0] * size[1]) <= 1
        assert 0.7 < w / h < 1.4
        assert abs(crop[0].mean() - 255 * (top + h / 2) / size[0]) < 8
        assert abs(crop[1].mean() - 255 * (left + w / 2) / size[1]) < 8


def test_smaller_decoding_is_near_to_full(decoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (15, 20, 3), dtype=np.uint8)
    data = jpeg(cv2.resize(noise, (1600, 1200), interpolation=cv2.INTER_CUBIC))
    reductions: list[int] = []
    for size, n in ((500, 2), (280, 4), (140, 8)):
        f = decode.image((size, size), crop=None, layout="hwc")
        assert decode._reduction(1200, 1600, f.size) == n
        smaller = decoded(f, data).astype(int)
        with monkeypatch.context() as patched:
            patched.setattr(decode, "_reduction", lambda *a: reductions.append(1) or 1)
            full = decoded(f, data).astype(int)
        assert (smaller != full).any()
        assert np.abs(smaller - full).mean() < 1.5
        assert np.abs(smaller - full).max() < 16
    assert len(reductions) == 3


def test_flips(decoder: str) -> None:
    data = jpeg(gradient(100, 100))
    f = decode.image(50, crop=None, flip=True)
    plain = decoded(decode.image(50, crop=None), data)
    flips = 0
    for seed in range(40):
        image = decoded(f, data, seed)
        flipped = bool(image[1, :, 0].mean() > 128)
        flips += flipped
        assert (image == (plain[:, :, ::-1] if flipped else plain)).all()
    assert 8 < flips < 32


def test_other_kinds_and_damaged_images(decoder: str) -> None:
    f = decode.image(32, crop=None)
    grey = cv2.imencode(".jpg", gradient(64, 64)[..., 0])[1].tobytes()
    assert np.abs(decoded(f, grey)[0].astype(int) - decoded(f, grey)[2]).max() < 3
    alpha = np.dstack([gradient(64, 64), np.full((64, 64), 9, np.uint8)])
    assert decoded(f, cv2.imencode(".png", alpha)[1].tobytes()).shape == (3, 32, 32)
    good = jpeg(gradient(64, 64))
    for bad in (b"", b"not an image", good[:3], good[:40], b"\xff\xd8\xff\xc0"):
        with pytest.raises((ValueError, OSError)):
            decoded(f, bad)
    with pytest.raises((ValueError, OSError), match="truncated"):
        decoded(f, jpeg(gradient(640, 640))[:9000])
    thumbnail = b"\xff\xe2" + (2 + len(good)).to_bytes(2, "big") + good  # which has an end, too
    whole = jpeg(gradient(640, 640))
    whole = whole[:2] + thumbnail + whole[2:]
    assert decoded(f, whole).shape == (3, 32, 32)
    with pytest.raises((ValueError, OSError), match="truncated"):
        decoded(f, whole[:-2000])
    large = cv2.imencode(".png", gradient(64, 64))[1].tobytes()
    damaged = large[:33] + b"\xb3" + large[34:]  # a chunk of 3 GB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with suppress(ValueError):  # Pillow reads what is there
        decoded(f, damaged)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


def encoded(kind: str, pixels: Array, **options: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind, **options)
    return out.getvalue()


def huge_images() -> dict[str, bytes]:
    """Return small files whose headers state 16,000 x 16,000 pixels."""
    small, side = np.zeros((16, 16, 3), np.uint8), struct.pack("<H", 16_000)
    found = {}
    big = side[::-1]
    for kind, before, size in (
        ("jpeg", b"\xff\xc0\0\x11\x08", big * 2),
        ("png", b"IHDR", (b"\0\0" + big) * 2),
        ("gif", b"GIF87a", side * 2),
        ("bmp", b"\x28\0\0\0", (side + b"\0\0") * 2),
        ("avif", b"ispe\0\0\0\0", (b"\0\0" + big) * 2),
        ("webp", b"/", (15_999 | 15_999 << 14).to_bytes(4, "little")),
        ("ppm", b"P6\n", b"16000 16000\n255\n"),
        ("tiff", b"\n\0", b"".join(b"%c\1\4\0\1\0\0\0%s\0\0" % (i, side) for i in (0, 1))),
        ("jpeg2000", b"\xff\x51\0\x2f\0\0", (b"\0\0" + big) * 2),
    ):
        data = encoded(kind, small, **({"lossless": True} if kind == "webp" else {}))
        at = data.index(before) + len(before)
        found[kind] = data[:at] + size + data[at + len(size) :]
    jpeg = found["jpeg"]
    for marker in (b"\xff\x01", b"\xff\xd0", b"\xff\xe0\0\0", b"\xff\xff"):
        found[f"jpeg {marker!r}"] = jpeg[:2] + marker + jpeg[2:]
    found["jpeg hidden"] = b"\xff\xd8\xff\0" + len(jpeg).to_bytes(2, "big") + jpeg[2:] + jpeg
    progressive = encoded("jpeg", small, progressive=True)
    at = progressive.index(b"\xff\xc2") + 5
    found["jpeg progressive"] = progressive[:at] + b"\xff\xd0" * 2 + progressive[at + 4 :]
    found["hdr"] = b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\n\n-Y 16000 +X 16000\n" + bytes(99)
    return found


@pytest.mark.parametrize("kind", huge_images())
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_huge_images_are_refused_before_memory_is_taken(decoder: str, kind: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(Exception, match=r"pixels|not an image"):
        decoded(decode.image(32, crop=None), huge_images()[kind])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


DEEP = (np.arange(64, dtype=np.uint16) * 300).reshape(8, 8)


@pytest.mark.parametrize(
    ("data", "values"),
    [
        (encoded("png", DEEP), True),
        (encoded("tiff", DEEP), True),
        (b"P5\n8 8\n65535\n" + DEEP.astype(">u2").tobytes(), True),
        (b"P5\n8 8\n40000\n" + DEEP.astype(">u2").tobytes(), False),
        (cv2.imencode(".tif", np.dstack([DEEP] * 3))[1].tobytes(), False),
        (encoded("tiff", DEEP.astype(np.float32)), False),
    ],
)
@pytest.mark.parametrize("layout", ["chw", "hwc"])
def test_images_of_more_than_8_bits(decoder: str, data: bytes, values: bool, layout: str) -> None:
    fails(lambda: decoded(decode.image(8, crop=None), data), ValueError, "bits a channel")
    deep = decode.image(8, crop=None, layout=layout, dtype="uint16")  # type: ignore[arg-type]
    if values:
        assert (decoded(deep, data) == (DEEP if layout == "chw" else DEEP[..., None])).all()
    else:
        fails(lambda: decoded(deep, data), ValueError, "bits")
    fails(lambda: decoded(deep, jpeg(gradient(64, 64))), ValueError, "8 bits", 'dtype="uint8"')


def test_decoding_in_a_reader(decoder: str, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["label"] = np.arange(40)
        images = file.create_dataset("jpg", (40,), h5py.vlen_dtype("u1"))
        for i in range(40):
            images[i] = np.frombuffer(jpeg(gradient(60 + i, 80)), np.uint8)
    dsprep.repack(tmp_path / "a.h5", tmp_path / "g.h5", buffer_size="10", durable=False)
    f = decode.image(32, crop="random", flip=True, field="jpg")
    with dsprep.Reader(tmp_path / "g.h5", 8, transform=dsprep.each(f), seed=1) as reader:
        batches = list(reader)
    assert [b["image"].shape for b in batches] == [(8, 3, 32, 32)] * 5
    assert all(b["image"].dtype == np.uint8 and list(b) == ["label", "image"] for b in batches)
    assert sorted(int(i) for b in batches for i in b["label"]) == list(range(40))


def test_what_is_impossible_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({"size": 0}, {"crop": "left"}, {"layout": "cwh"}, {"dtype": "f4"}):
        fails(lambda: decode.image(**options), UsageError)
    with pytest.raises(UsageError, match="0 of the fields"):
        decode.image()({"x": 1}, {"image": np.zeros((3, 224, 224), "u1")}, np.random.default_rng())
    monkeypatch.setitem(__import__("sys").modules, "cv2", None)
    assert decode.image().decoder == "pillow"
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(MissingExtra, match="images"):
        decode.image()
