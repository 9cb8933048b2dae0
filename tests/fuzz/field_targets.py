"""Values of fields: JSON, lists of strings, chats, images, as anybody may have stored them."""

from __future__ import annotations

import contextlib
import io

import numpy as np

from hpstore.errors import HpstoreError
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.dataset.image_decode import ImageDecode
from hpstore.loaders.dataset.json_values import encode_value
from hpstore.loaders.dataset.media_types import may_be, media_type_of
from hpstore.loaders.dataset.value_decoder import ValueDecoder
from hpstore.loaders.ingestion.arrow_classes import recorded_classes
from tests.fuzz.engine import Target

_JSON = {"json": Field("json"), "chat": Field("chat"), "str": Field("str", (None,))}
_IMAGES = {"image": Field("image")}
_MOST_PIXELS = 1 << 12


def take_json(data: bytes) -> None:
    """What one of the forms takes has a text, which is read as the same value."""
    decoder = ValueDecoder(_JSON, {})
    for form in _JSON:
        with contextlib.suppress(HpstoreError):
            value = decoder.value(form, np.frombuffer(data, np.uint8))
            text = encode_value(form, value)  # refuses 1e999, which is read as infinite
            again = decoder.value(form, np.frombuffer(text, np.uint8))
            assert repr(again) == repr(value)


def take_image(data: bytes) -> None:
    decoder = ValueDecoder(_IMAGES, {"image": ImageDecode(most_pixels=_MOST_PIXELS)})
    with contextlib.suppress(HpstoreError):
        found = decoder.value("image", np.frombuffer(data, np.uint8))
        assert found.shape[0] == 3
        assert found.numel() <= 3 * _MOST_PIXELS
    may_be(data, media_type_of(data) or "audio/wav")


def image_seeds() -> list[bytes]:
    """One of each format; none where Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        return [b"GIF89a"]
    found = []
    for kind in ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM"):
        out = io.BytesIO()
        Image.fromarray(np.arange(300, dtype=np.uint8).reshape(10, 10, 3)).save(out, kind)
        found.append(out.getvalue())
    return found


class _Schema:
    """One of Arrow, as far as names of classes are looked for in it."""

    def __init__(self, data: bytes) -> None:
        self.metadata = {b"huggingface": data}


def take_features(data: bytes) -> None:
    for names in recorded_classes(_Schema(data)).values():
        assert all(isinstance(name, str) for name in names)


FIELD_TARGETS = [
    Target(
        name="json-values",
        run=take_json,
        seeds=lambda: [
            b'{"a":[1,-0.0,1e300,null,true],"\xc3\xa9":{"b":"\\u0000"}}',
            b'["a","b"]',
            b'[{"role":"user","content":"x","tool_calls":[{"function":{"name":"f"}}]}]',
            b"[" * 300 + b"]" * 300,
        ],
    ),
    Target(name="image-values", run=take_image, seeds=image_seeds),
    Target(
        name="hugging-face-features",
        run=take_features,
        seeds=lambda: [
            b'{"info":{"features":{"x":{"names":["a"],"_type":"ClassLabel"},'
            b'"y":{"feature":{"names":["b"],"_type":"ClassLabel"},"_type":"Sequence"}}}}'
        ],
    ),
]
