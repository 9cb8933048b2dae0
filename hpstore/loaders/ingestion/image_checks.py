"""Whether the bytes of an encoded image are all there. Pure; nothing is decoded.

JPEG: its markers are followed to the end-of-image marker (ITU T.81 B.1); PNG: its chunks with their
CRCs to IEND (ISO 15948 5.3); GIF: its blocks to the trailer (GIF89a, appendix A); WebP and BMP:
their own sizes. TIFF and PNM carry nothing of the kind and pass.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable

import numpy as np

from hpstore.loaders.dataset.many_ranges import jpegs_end
from hpstore.loaders.dataset.value_rows import ValueRows

CHECKED = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp"})
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")  # not stuffing, restart, start, fill
_END = 0xD9
_BMP_HEADER = 14


def image_problem(data: bytes, suffix: str) -> str:
    """What is wrong with an image file of that ending (".jpg"), or ""."""
    if not data:
        return "it is empty"
    if data.startswith(b"\xff\xd8"):
        return _jpeg(data)
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return _png(data)
    if data.startswith(b"GIF8"):
        return _gif(data)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _sized("WebP", int.from_bytes(data[4:8], "little") + 8, data)
    if data.startswith(b"BM"):
        return _sized("BMP", max(_BMP_HEADER, int.from_bytes(data[2:6], "little")), data)
    return "it does not begin like an image" if suffix.lower() in CHECKED else ""


def any_problem(rows: ValueRows, suffix_of: Callable[[int], str]) -> bool:
    """Whether image_problem() finds something in one of many files. `suffix_of`: by row."""
    jpeg = rows.begin_with(b"\xff\xd8")
    ends = jpegs_end(rows.taken(np.flatnonzero(jpeg)))
    if ends is not None and not ends.all():
        return True
    left = range(len(rows)) if ends is None else np.flatnonzero(~jpeg).tolist()
    return any(image_problem(rows[row].tobytes(), suffix_of(row)) for row in left)


def _sized(kind: str, says: int, data: bytes) -> str:
    if says <= len(data):
        return ""
    return f"the {kind} is cut short: it says {says} bytes, {len(data)} are there"


def _jpeg(data: bytes) -> str:
    """Walk markers; between a scan and the next marker lies compressed data."""
    at = 2
    while found := _MARKER.search(data, at):
        marker = data[found.start() + 1]
        if marker == _END:
            return ""
        size = int.from_bytes(data[found.end() : found.end() + 2], "big")
        at = found.end() + max(size, 2)
    return "the JPEG is cut short: it has no end-of-image marker"


def _gif(data: bytes) -> str:
    """Walk its blocks to the trailer, behind which anything may lie."""
    cut = "the GIF ends before its trailer"
    if len(data) < 13:
        return cut
    at = 13 + _gif_colours(data[10])
    while at < len(data) and data[at] != 0x3B:
        if data[at] == 0x2C and at + 10 < len(data):
            at += 11 + _gif_colours(data[at + 9])
        elif data[at] == 0x21:
            at += 2
        else:
            return cut if data[at] == 0x2C else f"the GIF has no block at byte {at}"
        while at < len(data) and data[at]:
            at += 1 + data[at]
        at += 1
    return "" if at < len(data) else cut


def _gif_colours(flags: int) -> int:
    """Bytes of the table of colours that these flags announce."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _png(data: bytes) -> str:
    at = 8
    while at + 12 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        end = at + 12 + size
        if end > len(data):
            break
        if zlib.crc32(memoryview(data)[at + 4 : end - 4]) != int.from_bytes(data[end - 4 : end]):
            return f"the PNG chunk at byte {at} does not match its CRC"
        if data[at + 4 : at + 8] == b"IEND":
            return ""
        at = end
    return "the PNG is cut short: it has no IEND chunk"
