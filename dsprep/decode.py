"""Functions that decode a sample, for `dsprep.each`: `image`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np

from dsprep.core.schema import Array, DType
from dsprep.errors import MissingExtra, UsageError, require

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
"""Of a random crop: its share of the area, and its width by its height, as in training on
ImageNet (Szegedy et al., "Going Deeper with Convolutions", 2014, section 6)."""

MAX_PIXELS = 178_956_970
"""Pixels of the largest JPEG that is decoded: 0.5 GB, and where Pillow refuses one.

A quarter of it of others, for which libraries take up to 16 bytes a pixel.
"""

KINDS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
"""The images that are decoded, as Pillow calls them: all whose size and depth a header states."""

_PNG = b"\x89PNG\r\n\x1a\n"
_SEGMENTS = {0xC4, 0xCC, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)}  # that come before a frame header
_TRIES = 10
_CENTER = 256 / 224  # the shorter side, by the size that is cut out of its middle

Box: TypeAlias = Callable[[int, int], tuple[int, int, int, int]]
"""Of height and width, the part that is kept: top, left, height, width."""

Crop: TypeAlias = Literal["random", "center"]


class image:
    """Decode an image, crop, scale and flip it: a function for `dsprep.each`.

    Parameters
    ----------
    size
        Height and width of the result, or both by one number, in pixels.
    crop
        ``"random"``: a part of 8 to 100 % of the area with sides of 3:4 to 4:3, scaled to `size`;
        ``"center"``: the middle of the image, whose shorter side is scaled to 8/7 of `size`
        before; None: all of it, scaled to `size`.
    flip
        Whether every second image, by chance, is mirrored.
    field
        The field with the encoded image: JPEG, PNG, WebP, GIF, BMP, TIFF, PPM or AVIF. None: the
        only field of kind `bytes`.
    name
        What the result is called.
    layout
        ``"chw"``: shape ``(3, height, width)``; ``"hwc"``: ``(height, width, 3)``. Either is RGB.
    dtype
        ``"uint8"``: subtract and divide on the accelerator, to which it is a quarter of the bytes
        of float32. ``"uint16"``: images of 16 bits a channel, such as depth maps and X-rays, with
        the values that are stored. An image of other depth is an error, never rounded.

    Attributes
    ----------
    decoder
        ``"opencv"``, or ``"pillow"`` where that is not installed, and of all but JPEG and PNG.
        Large JPEGs are decoded at 1/2, 1/4 or 1/8 of their size where that is enough. Pixels of
        the two differ a little.
    out
        What it fills, for `dsprep.each`.

    Raises
    ------
    MissingExtra
        If neither is installed.
    UsageError
        If arguments are impossible.

    Examples
    --------
    >>> decode = dsprep.each(dsprep.decode.image(224, crop="random", flip=True))  # doctest: +SKIP
    >>> reader = dsprep.Reader("train.h5", 64, transform=decode)  # doctest: +SKIP
    """

    def __init__(
        self,
        size: int | tuple[int, int] = 224,
        *,
        crop: Crop | None = "center",
        flip: bool = False,
        field: str | None = None,
        name: str = "image",
        layout: Literal["chw", "hwc"] = "chw",
        dtype: Literal["uint8", "uint16"] = "uint8",
    ) -> None:
        height, width = (size, size) if isinstance(size, int) else size
        expected = "pixels, at least 1"
        require(min(height, width) >= 1, UsageError, f"size is {size}", expected=expected)
        for option, value, values in (
            ("crop", crop, ("random", "center", None)),
            ("layout", layout, ("chw", "hwc")),
            ("dtype", dtype, ("uint8", "uint16")),
        ):
            expected = "one of " + ", ".join(map(repr, values))
            require(value in values, UsageError, f"{option} is {value!r}", expected=expected)
        self.size, self.crop, self.flip = (height, width), crop, flip
        self.field, self.name, self.layout = field, name, layout
        shape = (3, height, width) if layout == "chw" else (height, width, 3)
        self.out: dict[str, tuple[DType, tuple[int, ...]]] = {name: (np.dtype(dtype), shape)}
        self.decoder = _decoder()

    def __call__(
        self, sample: dict[str, Any], out: dict[str, Array], rng: np.random.Generator
    ) -> None:
        """Fill ``out[name]``; see `dsprep.each`."""
        data = self._encoded(sample)
        draws = rng.random(2 * _TRIES + 3) if self.crop == "random" or self.flip else np.zeros(0)
        flipped = bool(self.flip and draws[-1] < 0.5)
        box = partial(self.box, draws=draws)
        target, planes = out[self.name], self.layout == "chw"
        header = _read_header(data) if self.decoder == "opencv" else None
        if header is not None:
            _by_opencv(data, header, box, self.size, flipped, target, planes)
        else:
            _by_pillow(data, box, self.size, flipped, target, planes)

    def _encoded(self, sample: dict[str, Any]) -> bytes:
        if self.field is not None:
            data = sample[self.field]
        else:
            blobs = [value for value in sample.values() if isinstance(value, bytes)]
            words, fix = f"{len(blobs)} of the fields are bytes", "name the image's: field="
            require(len(blobs) == 1, UsageError, words, fix=fix)
            data = blobs[0]
        return data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes()

    def box(self, height: int, width: int, draws: Array) -> tuple[int, int, int, int]:
        """Return the part of an image that is kept: top, left, height, width, in pixels.

        Parameters
        ----------
        height, width
            Of the image.
        draws
            float64 in [0, 1), shape ``(23,)``: what a random crop is drawn by.
        """
        tall, wide = self.size
        if self.crop is None:
            return 0, 0, height, width
        if self.crop == "center":
            scale = min(height / tall, width / wide) / _CENTER
            h, w = min(height, round(tall * scale)), min(width, round(wide * scale))
            return (height - h) // 2, (width - w) // 2, max(1, h), max(1, w)
        for area, ratio in draws[: 2 * _TRIES].reshape(-1, 2).tolist():
            pixels = height * width * (SCALE[0] + area * (SCALE[1] - SCALE[0]))
            aspect = RATIO[0] * (RATIO[1] / RATIO[0]) ** ratio  # as likely below 1 as above
            h, w = round(math.sqrt(pixels / aspect)), round(math.sqrt(pixels * aspect))
            if 0 < h <= height and 0 < w <= width:
                break
        else:
            h, w = min(height, round(width / RATIO[0])), min(width, round(height * RATIO[1]))
        top, left = (
            int(d * (n + 1)) for d, n in zip(draws[-3:-1], (height - h, width - w), strict=True)
        )
        return top, left, h, w


def _decoder() -> str:
    """Return which library decodes."""
    try:
        import cv2  # noqa: F401
    except ImportError:
        try:
            import PIL.Image  # noqa: F401
        except ImportError as error:
            fix = "pip install 'dsprep[images]'"
            raise MissingExtra("dsprep.decode needs OpenCV or Pillow", fix=fix) from error
        return "pillow"
    return "opencv"


def _reduction(h: int, w: int, size: tuple[int, int]) -> int:
    """Return by how much an image may be decoded smaller: at least `size` is left of a part."""
    return next((n for n in (8, 4, 2) if h >= n * size[0] and w >= n * size[1]), 1)


def _by_opencv(
    data: bytes,
    header: _Header,
    box: Box,
    size: tuple[int, int],
    flipped: bool,
    target: Array,
    planes: bool,
) -> None:
    """Fill `target` with the part of a JPEG or PNG that is kept, scaled to `size`: RGB."""
    import cv2

    height, width, bits, frame = header
    _check(height, width, bits, target, bool(frame))
    top, left, h, w = box(height, width)
    n = 1
    if frame:
        n = _reduction(h, w, size)
        if data.rfind(b"\xff\xd9") < frame:  # OpenCV makes the rest grey
            raise ValueError("the image is truncated: its end is missing")
    flags = {1: cv2.IMREAD_COLOR, 2: cv2.IMREAD_REDUCED_COLOR_2, 4: cv2.IMREAD_REDUCED_COLOR_4}
    flag = flags.get(n, cv2.IMREAD_REDUCED_COLOR_8) | cv2.IMREAD_IGNORE_ORIENTATION
    flag |= cv2.IMREAD_ANYDEPTH if bits > 8 else 0
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flag)
    if pixels is None:
        raise ValueError("it is not an image that OpenCV can decode")
    part = pixels[top // n : -(-(top + h) // n), left // n : -(-(left + w) // n)]
    small = part.shape[0] >= 2 * size[0] and part.shape[1] >= 2 * size[1]
    how = cv2.INTER_AREA if small else cv2.INTER_LINEAR  # which takes 1/7 of its time
    scaled = cv2.resize(part, size[::-1], interpolation=how)
    if flipped:
        cv2.flip(scaled, 1, scaled)
    if planes:  # in place and several times as quick as assigning a transposed view
        cv2.split(scaled, [target[2], target[1], target[0]])
    else:
        cv2.cvtColor(scaled, cv2.COLOR_BGR2RGB, target)


def _by_pillow(
    data: bytes, box: Box, size: tuple[int, int], flipped: bool, target: Array, planes: bool
) -> None:
    """Do the same as `_by_opencv`, but for rounding, for an image of any of `KINDS`."""
    import io

    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        fix = "pip install pillow"
        raise MissingExtra("only Pillow decodes what is not JPEG or PNG", fix=fix) from error
    try:
        opened = Image.open(io.BytesIO(data), formats=KINDS)
    except UnidentifiedImageError as error:
        raise ValueError(f"it is not an image of {', '.join(KINDS)}, or damaged") from error
    with opened:
        height, width = opened.height, opened.width
        bits = _read_bits(opened, data)
        tags = opened.tag_v2 if opened.format == "TIFF" else {}
        tile = tags.get(322, 1) * tags.get(323, 1)  # may be larger than the image
        _check(max(height, tile // width), width, bits, target, opened.format == "JPEG")
        top, left, h, w = box(height, width)
        n = _reduction(h, w, size)
        if n > 1:
            opened.draft("RGB", (-(-width // n), -(-height // n)))
        scale = opened.width / width
        area = tuple(edge * scale for edge in (left, top, left + w, top + h))
        if bits > 8 and not opened.mode.startswith("I"):
            raise ValueError("colors of 16 bits are decoded by OpenCV, and of PNG alone")
        mode = "I" if bits > 8 else "RGB"
        converted = opened if opened.mode == mode else opened.convert(mode)
        scaled = converted.resize(size[::-1], Image.Resampling.BILINEAR, area)
    pixels = np.asarray(scaled)[:, :: -1 if flipped else 1]
    if bits > 8:
        if pixels.min() < 0:
            raise ValueError("it has negative values")
        pixels = np.stack([pixels] * 3, axis=2)
    target[:] = pixels.transpose(2, 0, 1) if planes else pixels


def _check(height: int, width: int, bits: int, target: Array, jpeg: bool) -> None:
    """Raise `ValueError` for a size that a damaged or hostile header states, or another depth."""
    limit = MAX_PIXELS if jpeg else MAX_PIXELS // 4
    if height * width > limit:
        raise ValueError(f"its header says {width} x {height} pixels, more than {limit:,}")
    expected = target.dtype.itemsize * 8
    if max(bits, 8) != expected:
        own = "decode it in a function of your own"
        fix = {8: 'dtype="uint8"', 16: 'dtype="uint16"'}.get(max(bits, 8), own)
        raise ValueError(f"it has {bits} bits a channel, not {expected}: {fix}")


def _read_bits(opened: Any, data: bytes) -> int:
    """Return the bits a channel of an image that Pillow has opened, of which it may keep 8."""
    if opened.format == "PNG":
        return data[24]
    if opened.format == "TIFF":
        return int(max(opened.tag_v2.get(258, (1,))))
    if opened.format == "AVIF":
        return 10 if data[data.find(b"av1C") + 6] & 0x40 else 8
    if opened.format == "PPM" and opened.tile[0].codec_name != "raw":
        largest = int(opened.tile[0].args[1])  # value, to which Pillow scales others
        return 16 if largest == 65535 else min(largest.bit_length(), 15)
    return {"I": 16, "F": 32}.get(opened.mode, 8)


_Header: TypeAlias = tuple[int, int, int, int]
"""Height, width and bits of a JPEG or PNG, and the offset of the frame header of a JPEG, else 0."""


def _read_header(data: bytes) -> _Header | None:
    """Return the size of a JPEG or PNG as the libraries for them find it; None: not one, or odd."""
    if data.startswith(_PNG + b"\0\0\0\rIHDR") and len(data) > 24:
        at = len(_PNG)
        while at + 8 <= len(data):  # sizes of chunks, for which OpenCV would have memory first
            at += 12 + int.from_bytes(data[at : at + 4], "big")  # length, name, the chunk, its sum
        if at > len(data):
            raise ValueError("the image is truncated or damaged: a chunk ends beyond it")
        width, height = (int.from_bytes(data[k : k + 4], "big") for k in (16, 20))
        return height, width, data[24], 0
    at = 2 if data[:2] == b"\xff\xd8" else len(data)  # ITU-T T.81, annex B.2.2
    while at + 9 < len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = (int.from_bytes(data[at + k : at + k + 2], "big") for k in (5, 7))
            return (height, width, data[at + 4], at) if height and width else None
        if marker != 0xFF and (marker not in _SEGMENTS or length < 2):
            return None
        at += 1 if marker == 0xFF else 2 + length
    return None
