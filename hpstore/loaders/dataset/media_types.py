"""What encoded bytes are, by their first bytes. Pure."""

from __future__ import annotations

_HEAD_BYTES = 16
_RIFF = {b"WAVE": "audio/wav", b"AVI ": "video/x-msvideo", b"WEBP": "image/webp"}
_BRANDS = {b"M4A ": "audio/mp4", b"M4B ": "audio/mp4", b"qt  ": "video/quicktime"}
_HEADS = (
    (b"fLaC", "audio/flac"),
    (b"OggS", "application/ogg"),
    (b"ID3", "audio/mpeg"),
    (b"\x1aE\xdf\xa3", "application/matroska"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"\x00\x00\x01\xb3", "video/mpeg"),
    (b"\x00\x00\x01\xba", "video/mpeg"),
)
# names of one container, whatever is in it
_SAME = (
    {"application/ogg", "audio/ogg", "video/ogg", "audio/opus"},
    {"application/matroska", "video/webm", "audio/webm", "video/matroska", "video/x-matroska"}
    | {"audio/matroska", "audio/x-matroska"},
    {"video/mp4", "audio/mp4", "application/mp4", "audio/m4a", "audio/x-m4a", "video/quicktime"}
    | {"audio/aac", "image/heic", "image/heif", "image/avif"},
    {"audio/wav", "audio/x-wav", "audio/wave", "audio/vnd.wave"},
    {"audio/flac", "audio/x-flac"},
    {"audio/mpeg", "audio/mp3", "audio/aac", "audio/flac", "audio/x-flac"},  # ID3 stands before all
    {"video/x-msvideo", "video/avi", "video/msvideo"},
    {"video/mpeg", "video/mp2t", "video/mpg"},
    {"image/jpeg", "image/jpg"},
)


def media_type_of(data: bytes) -> str:
    """The media type by the first bytes; "" where they are of none that is known here."""
    head = bytes(data[:_HEAD_BYTES])
    if head[:4] == b"RIFF":
        return _RIFF.get(head[8:12], "")
    if head[4:8] == b"ftyp":
        return _BRANDS.get(head[8:12], "video/mp4")
    return next((found for start, found in _HEADS if head.startswith(start)), "")


def may_be(data: bytes, media_type: str) -> bool:
    """Whether bytes may be of this type: they do not begin as another one does."""
    found = media_type_of(data)
    if not found or found == media_type:
        return True
    return any(found in names and media_type in names for names in _SAME)
