"""Functions that decode a sample, for `dsprep.each`: `image`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np

from dsprep.core.schema import Array, DType
from dsprep.errors import MissingExtra, UsageError

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
"""Of a random crop: its share of the area, and its width by its height, as in training on
ImageNet (Szegedy et al., "Going Deeper with Convolutions", 2014, section 6)."""

MOST_PIXELS = 178_956_970
"""Pixels of a JPEG or PNG that are decoded at most: 0.5 GB, and where Pillow refuses an image."""

_PNG = b"\x89PNG\r\n\x1a\n"
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
        The field with the encoded image: JPEG, PNG, WebP and what else the decoder knows. None:
        the only field of kind `bytes`.
    name
        What the result is called.
    layout
        ``"chw"``: shape ``(3, height, width)``; ``"hwc"``: ``(height, width, 3)``. Either is uint8,
        RGB: subtract and divide on the accelerator, to which it is a quarter of the bytes.

    Attributes
    ----------
    decoder
        ``"opencv"``, or ``"pillow"`` where that is not installed. Large JPEGs are decoded at 1/2,
        1/4 or 1/8 of their size where that is enough. Pixels of the two differ a little.
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
    ) -> None:
        height, width = (size, size) if isinstance(size, int) else size
        if min(height, width) < 1:
            raise UsageError(f"size is {size}", expected="pixels, at least 1")
        if crop not in ("random", "center", None) or layout not in ("chw", "hwc"):
            raise UsageError(
                f"crop is {crop!r}, layout is {layout!r}",
                expected='crop "random", "center" or None; layout "chw" or "hwc"',
            )
        self.size, self.crop, self.flip = (height, width), crop, flip
        self.field, self.name, self.layout = field, name, layout
        shape = (3, height, width) if layout == "chw" else (height, width, 3)
        self.out: dict[str, tuple[DType, tuple[int, ...]]] = {name: (np.dtype("u1"), shape)}
        self.decoder = _decoder()

    def __call__(
        self, sample: dict[str, Any], out: dict[str, Array], rng: np.random.Generator
    ) -> None:
        """Fill ``out[name]``; see `dsprep.each`."""
        data = self._encoded(sample)
        draws = rng.random(2 * _TRIES + 3) if self.crop == "random" or self.flip else np.zeros(0)
        decode = _by_opencv if self.decoder == "opencv" else _by_pillow
        flipped = bool(self.flip and draws[-1] < 0.5)
        box = partial(self.box, draws=draws)
        decode(data, box, self.size, flipped, out[self.name], self.layout == "chw")

    def _encoded(self, sample: dict[str, Any]) -> bytes:
        if self.field is not None:
            data = sample[self.field]
        else:
            found = [value for value in sample.values() if isinstance(value, bytes)]
            if len(found) != 1:
                raise UsageError(
                    f"{len(found)} of the fields are bytes",
                    fix="name the one with the image: field=",
                )
            data = found[0]
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
    data: bytes, box: Box, size: tuple[int, int], flipped: bool, target: Array, planes: bool
) -> None:
    """Fill `target` with the part of an image that is kept, scaled to `size`: RGB."""
    import cv2

    known, n = _jpeg_size(data), 1
    if known is None and data.startswith(_PNG):
        _check_png(data)
    if known is not None:
        *shape, start = known
        top, left, h, w = box(*shape)
        n = _reduction(h, w, size)
        _check_pixels(shape[0] // n, shape[1] // n)
        if data.rfind(b"\xff\xd9") < start:  # OpenCV makes the rest grey; a thumbnail ends before
            raise ValueError("the image is truncated: its end is missing")
    flags = {1: cv2.IMREAD_COLOR, 2: cv2.IMREAD_REDUCED_COLOR_2, 4: cv2.IMREAD_REDUCED_COLOR_4}
    flag = flags.get(n, cv2.IMREAD_REDUCED_COLOR_8) | cv2.IMREAD_IGNORE_ORIENTATION
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flag) if data else None
    if pixels is None:
        raise ValueError("it is no image that OpenCV can decode")
    if known is None:
        top, left, h, w = box(*pixels.shape[:2])
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
    """Do the same as `_by_opencv`, but for rounding."""
    import io

    from PIL import Image

    with Image.open(io.BytesIO(data)) as opened:
        height, width = opened.height, opened.width
        top, left, h, w = box(height, width)
        n = _reduction(h, w, size)
        if n > 1:
            opened.draft("RGB", (-(-width // n), -(-height // n)))
        scale = opened.width / width
        area = tuple(edge * scale for edge in (left, top, left + w, top + h))
        scaled = opened.convert("RGB").resize(size[::-1], Image.Resampling.BILINEAR, area)
    pixels = np.asarray(scaled)[:, :: -1 if flipped else 1]
    target[:] = pixels.transpose(2, 0, 1) if planes else pixels


def _check_pixels(one: int, other: int) -> None:
    """Raise `ValueError` if an image is so large that a damaged or hostile header says so."""
    if one * other > MOST_PIXELS:
        raise ValueError(f"its header says {one} x {other} pixels, more than {MOST_PIXELS:,}")


def _check_png(data: bytes) -> None:
    """Raise `ValueError` for sizes in a PNG that OpenCV would have memory for before it looks."""
    _check_pixels(int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big"))
    at = len(_PNG)
    while at + 8 <= len(data):
        at += 12 + int.from_bytes(data[at : at + 4], "big")  # length, name, the chunk, its sum
    if at > len(data):
        raise ValueError("the image is truncated or damaged: a chunk ends beyond it")


def _jpeg_size(data: bytes) -> tuple[int, int, int] | None:
    """Return height, width and offset of the frame header of a JPEG; None: it is none, or damaged.

    Source: ITU-T T.81, annex B.2.2.
    """
    if data[:2] != b"\xff\xd8":
        return None
    at = 2
    while at + 9 < len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = (int.from_bytes(data[at + k : at + k + 2], "big") for k in (5, 7))
            return (height, width, at) if height and width else None
        at += 1 if marker == 0xFF else 2 + length
    return None
