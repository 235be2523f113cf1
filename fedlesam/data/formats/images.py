"""Single image files: PNG, JPEG and their like."""

import contextlib
import io
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

from fedlesam.data._files import Pixels

FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "PPM", "TIFF")
SUFFIXES = (".png", ".jpg", ".jpeg", ".jpe", ".bmp", ".webp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")
LARGEST = 2**26
"""Pixels of one image; no larger one is decoded."""


class _Refused(ValueError):
    """Readable, but not wanted."""


class Header(NamedTuple):
    """What an image file says of its pixels."""

    width: int
    """In pixels."""
    height: int
    """In pixels."""
    grey: bool
    """Whether it has no colours."""


@contextlib.contextmanager
def _opened(data: bytes, where: str) -> Iterator[tuple[Image.Image, Header]]:
    """The image and its header; an error in its use says where the image is."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            yield image, _checked(image, where)
    except _Refused:
        raise
    except Exception as error:  # Pillow raises whatever a damaged file provokes
        reason = str(error).split(" <_io")[0] or type(error).__name__
        raise ValueError(f"{where}: does not decode as an image ({reason}); replace or remove it") from error


def header(data: bytes, where: str) -> Header:
    """Size and kind, without decoding the pixels.

    Args:
        data: The whole file.
        where: The file's name, for messages.
    """
    with _opened(data, where) as (_, found):
        return found


def decode(data: bytes, shape: tuple[int, int, int], where: str) -> Pixels:
    """The pixels as channels x height x width, grey or colour as `shape` asks; transparency is dropped.

    Args:
        data: The whole file.
        shape: Channels, height and width that it must have.
        where: The file's name, for messages.
    """
    channels, height, width = shape
    with _opened(data, where) as (image, found):
        if (found.height, found.width) != (height, width):
            raise _Refused(
                f"{where}: the image is {found.width} x {found.height}, expected {width} x {height}; "
                "all images must have the same size, resize them first"
            )
        raw = _converted(image, "L" if channels == 1 else "RGB").tobytes()
        return np.frombuffer(raw, np.uint8).reshape(height, width, channels).transpose(2, 0, 1)


def decode_any(data: bytes, size: int, where: str) -> Pixels:
    """Colour pixels as 3 x size x size: the shorter side becomes `size`, of the longer one the middle is taken.

    Args:
        data: The whole file.
        size: In pixels.
        where: The file's name, for messages.
    """
    with _opened(data, where) as (image, _):
        raw = ImageOps.fit(_converted(image, "RGB"), (size, size), Image.Resampling.BICUBIC).tobytes()
        return np.frombuffer(raw, np.uint8).reshape(size, size, 3).transpose(2, 0, 1)


def _converted(image: Image.Image, mode: str) -> Image.Image:
    opaque = image.convert("RGBA") if image.mode == "P" and "transparency" in image.info else image
    return opaque if opaque.mode == mode else opaque.convert(mode)


def _checked(image: Image.Image, where: str) -> Header:
    (width, height), mode = image.size, image.mode
    if width * height > LARGEST:
        raise _Refused(f"{where}: an image of {width} x {height} pixels; more than {LARGEST:,} are refused")
    if mode.startswith(("I", "F")):
        raise _Refused(f"{where}: an image with more than 8 bits per value (mode {mode}); convert it to 8 bits")
    return Header(width, height, mode in ("1", "L", "LA"))
