"""Fields of media record what their values are, and refuse what says that it is something else."""

from __future__ import annotations

import io
import wave

import pytest

from hpstore.errors import ConfigError
from hpstore.loaders import Field
from hpstore.loaders.dataset.fields import ragged_value
from hpstore.loaders.dataset.media_types import may_be, media_type_of


def sound() -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as written:
        written.setparams((1, 2, 8000, 10, "NONE", ""))
        written.writeframes(bytes(20))
    return out.getvalue()


HEADS = {
    "audio/wav": sound(),
    "audio/flac": b"fLaC\0\0\0\x22",
    "audio/mpeg": b"ID3\4",
    "application/ogg": b"OggS\0\2",
    "application/matroska": b"\x1aE\xdf\xa3\x01",
    "video/mp4": b"\0\0\0\x20ftypisom",
    "audio/mp4": b"\0\0\0\x20ftypM4A ",
    "video/x-msvideo": b"RIFF\0\0\0\0AVI LIST",
    "image/png": b"\x89PNG\r\n\x1a\n",
    "image/jpeg": b"\xff\xd8\xff\xe0",
    "image/webp": b"RIFF\0\0\0\0WEBPVP8 ",
    "": b"nothing known",
}


@pytest.mark.parametrize("kind", HEADS)
def test_the_first_bytes_tell(kind: str) -> None:
    assert media_type_of(HEADS[kind]) == kind
    assert media_type_of(b"") == ""
    assert may_be(HEADS[kind], kind or "audio/flac")


@pytest.mark.parametrize(
    ("kind", "given"),
    [("application/ogg", "audio/opus"), ("application/matroska", "video/webm")],
)
def test_a_container_may_be_named_by_what_is_in_it(kind: str, given: str) -> None:
    assert may_be(HEADS[kind], given)


def test_bytes_of_another_type_are_refused() -> None:
    """By the names of both. What tells nothing, and a field without a type, takes everything."""
    flac = Field("audio", media_type="audio/flac")
    with pytest.raises(ConfigError, match="field 'a' is audio/wav, the field has audio/flac"):
        ragged_value("a", flac, sound(), "sample 0")
    for field, data in ((flac, HEADS["audio/flac"]), (flac, b"raw"), (Field("audio"), sound())):
        assert ragged_value("a", field, data, "sample 0").tobytes() == data


@pytest.mark.parametrize("given", ["flac", "audio/", "text/plain", "audio/FLAC", 3])
def test_a_wrong_media_type_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="media_type"):
        Field("audio", media_type=given)
    with pytest.raises(ConfigError, match="has no media_type"):
        Field("bytes", media_type="audio/flac")
