"""Encoded images to tensors of uint8, by simplejpeg or Pillow. An attacker may have
written the bytes."""

from __future__ import annotations

import importlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from hpstore.errors import ConfigError
from hpstore.loaders.dataset.fields import Array, Field
from hpstore.units import whole_argument

BACKENDS = ("auto", "pil", "simplejpeg")
LAYOUTS = ("chw", "hwc")
MODES = {"RGB": 3, "L": 1, "RGBA": 4}
MOST_PIXELS = 1 << 26
"""Of an image, unless said otherwise: 200 MB as RGB. Below Pillow's own limit."""
# what Pillow may take the bytes for: none that starts other programs, as EPS does
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_JPEG = b"\xff\xd8\xff"
_DEEP = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")  # Pillow cuts these off at 255


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDecode:
    """How images are decoded.

    Parameters
    ----------
    mode
        "RGB", "L" (grey) or "RGBA": what every image becomes.
    layout
        "chw", as torch has it, or "hwc": of the tensors.
    backend
        "pil", "simplejpeg" (JPEG alone), or "auto": for each image the fastest that is installed.
    most_pixels
        An image of more is refused before it is decoded.

    Raises
    ------
    ConfigError
        One of them is wrong.
    """

    mode: str = "RGB"
    layout: str = "chw"
    backend: str = "auto"
    most_pixels: int = MOST_PIXELS

    def __post_init__(self) -> None:
        choices = {"mode": tuple(MODES), "layout": LAYOUTS, "backend": BACKENDS}
        for name, known in choices.items():
            given = getattr(self, name)
            if given not in known:
                raise ConfigError(f"{name} {given!r} of images: choose of {', '.join(known)}")
        whole_argument("most_pixels", self.most_pixels, least=1)


Decode: TypeAlias = bool | ImageDecode | Mapping[str, bool | ImageDecode] | None
"""What users say of images: see DataLoader."""


def checked_decode(decode: object, fields: Mapping[str, Field]) -> dict[str, ImageDecode]:
    """How to decode each field of images, by name. Raises ConfigError.

    `decode`: None for none; True or an ImageDecode for all fields of dtype "image"; or a dict of
    these by name, also of fields of bytes.
    """
    if decode is None or decode is False:
        return {}
    named: Mapping[Any, Any]
    if isinstance(decode, Mapping):
        named = decode
    else:
        named = {name: decode for name, made in fields.items() if made.dtype == "image"}
        if not named:
            raise ConfigError(
                f"decode: no field is an image (fields: {list(fields)}). Of fields of bytes, name "
                'them: decode={"image": True}'
            )
    found = {}
    for name, how in named.items():
        if name not in fields or fields[name].dtype not in ("image", "bytes"):
            raise ConfigError(f"decode: {name!r} is no field of images or bytes that is read")
        if how is True:
            how = ImageDecode()
        if not isinstance(how, ImageDecode):
            raise ConfigError(f"decode of {name!r} is {how!r}: give True or an ImageDecode(...)")
        _require(how.backend)
        found[name] = how
    return found


def decode_image(data: bytes | memoryview, how: ImageDecode) -> torch.Tensor:
    """A uint8 tensor of an encoded image, its first frame; EXIF's orientation is not applied.

    Raises ValueError for bytes that are no image, are cut short, or have too many pixels;
    ConfigError when the packages are not installed.
    """
    jpeg = bytes(data[:3]) == _JPEG
    pixels: Array | None = None
    if how.backend == "simplejpeg" and not jpeg:
        raise ValueError("it is no JPEG, and simplejpeg decodes nothing else")
    if jpeg and how.backend != "pil" and (library := _found("simplejpeg")) is not None:
        pixels = _by_simplejpeg(library, data, how)
    if pixels is None:
        pixels = _by_pillow(data, how)
    if how.layout == "chw":
        pixels = np.ascontiguousarray(pixels.transpose(2, 0, 1))
    return torch.from_numpy(pixels)


def _by_simplejpeg(library: Any, data: bytes | memoryview, how: ImageDecode) -> Array | None:
    """(h, w, c); None where it cannot make this mode of it. Pixels are those that Pillow makes."""
    height, width, colours, _ = library.decode_jpeg_header(data)
    _check_pixels(width, height, how)
    if colours not in ("YCbCr", "Gray", "RGB") or how.mode == "RGBA":
        return None
    if how.mode == "L" and colours != "Gray":
        return None  # Pillow weighs the colours, libjpeg takes the luminance that is stored
    mode = "GRAY" if how.mode == "L" else "RGB"
    made: Array = library.decode_jpeg(
        data, colorspace=mode, fastdct=False, fastupsample=False, strict=True
    )
    return made


def _by_pillow(data: bytes | memoryview, how: ImageDecode) -> Array:
    image_module = _require_pillow()
    try:
        with image_module.open(io.BytesIO(data), formats=_FORMATS) as image:
            _check_pixels(image.width, image.height, how)
            if image.mode in _DEEP:
                raise ValueError(f"its pixels have more than 8 bits ({image.mode})")
            image.load()
            made = np.array(image.convert(how.mode))
    except (ValueError, MemoryError):
        raise
    except Exception as error:  # Pillow raises whatever its decoders do, OSError for most
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return made if made.ndim == 3 else made[:, :, None]


def _check_pixels(width: int, height: int, how: ImageDecode) -> None:
    if width * height > how.most_pixels:
        raise ValueError(
            f"it has {width} x {height} pixels, more than most_pixels={how.most_pixels}"
        )


def _require(backend: str) -> None:
    """Raise ConfigError unless what it needs is installed."""
    if backend == "simplejpeg":
        if _found("simplejpeg") is None:
            raise ConfigError("decode by simplejpeg: pip install simplejpeg")
    else:
        _require_pillow()


def _require_pillow() -> Any:
    found = _found("PIL.Image")
    if found is None:
        raise ConfigError("decoding images needs Pillow: pip install 'hpstore[images]'")
    return found


def _found(name: str) -> Any:
    """A package that may be installed; None where it is not."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
