"""Image files for ingest: what is found in a tree, and whether an encoded image is all there."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import pytest

from hpstore.errors import ConfigError
from hpstore.loaders.ingestion.image_checks import image_problem
from hpstore.loaders.ingestion.image_source import ImageFolder
from hpstore.loaders.ingestion.sample_source import digest_of


def jpeg(body: bytes = b"\x01\x02") -> bytes:
    """Start, one segment, a scan with a stuffed byte and a restart, end."""
    segment = b"\xff\xe0" + struct.pack(">H", 2 + len(body)) + body
    return b"\xff\xd8" + segment + b"\xff\xda\x00\x02" + b"a\xff\x00b\xff\xd0c" + b"\xff\xd9"


def png(*data: bytes) -> bytes:
    """Chunks with their CRCs."""
    made = b"\x89PNG\r\n\x1a\n"
    for kind, body in [(b"IDAT", part) for part in data] + [(b"IEND", b"")]:
        made += struct.pack(">I", len(body)) + kind + body
        made += struct.pack(">I", zlib.crc32(kind + body))
    return made


def gif(*frames: bytes, local: bool = False) -> bytes:
    """A table of two colours, an extension and an image a frame, which has one of its own."""
    made = b"GIF89a\x01\0\x01\0\x80\0\0" + bytes(6)
    for data in frames:
        table = bytes(12) if local else b""
        made += b"\x21\xf9\x04\0\0\0\0\0"
        made += b"\x2c" + bytes(8) + (b"\x81" if local else b"\0") + table
        made += b"\x02" + bytes([len(data)]) + data + b"\0"
    return made + b";"


WHOLE = {
    ".jpg": jpeg(),
    ".png": png(b"abc", b"defg"),
    ".gif": gif(b"a;b", b";", local=True),
    ".webp": b"RIFF" + struct.pack("<I", 8) + b"WEBPVP8 ",
    ".bmp": b"BM" + struct.pack("<I", 18) + b"header, data",
}


@pytest.mark.parametrize("suffix", WHOLE)
def test_whole_images_pass_and_every_cut_is_found(suffix: str) -> None:
    """No beginning of an image passes for the whole one."""
    whole = WHOLE[suffix]
    assert image_problem(whole, suffix) == ""
    for size in range(len(whole)):
        assert image_problem(whole[:size], suffix), f"{size} of {len(whole)} bytes passed"


def test_an_end_marker_inside_a_segment_is_not_the_end() -> None:
    """A thumbnail in a JPEG's segment has an end marker of its own."""
    whole = jpeg(b"\xff\xd8 thumbnail \xff\xd9")
    assert image_problem(whole, ".jpg") == ""
    assert "no end-of-image" in image_problem(whole[:-2], ".jpg")


def test_what_lies_behind_the_end_of_a_gif_is_no_fault() -> None:
    """Decoders read such files; a trailer's byte inside its data is no end. (Case r8_small.)"""
    for whole in (gif(b"\x01"), gif(b"\x01;", local=True), gif()):
        assert image_problem(whole + b"more; bytes", ".gif") == ""
        assert image_problem(whole[:-1], ".gif")
    assert "no block" in image_problem(gif()[:-1] + b"?;", ".gif")


def test_a_flipped_bit_in_a_png_is_found() -> None:
    """Chunks carry CRCs."""
    damaged = bytearray(png(b"abcdef"))
    damaged[18] ^= 1
    assert "CRC" in image_problem(bytes(damaged), ".png")


def test_what_has_no_marks_passes_and_text_as_jpg_does_not() -> None:
    """TIFF is kept unchecked; a page of HTML that was saved as .jpg is no image."""
    assert image_problem(b"II*\0 whatever", ".tiff") == ""
    assert "does not begin like an image" in image_problem(b"<html>", ".JPG")


def tree(root: Path) -> Path:
    """Two classes, one nested folder, other files, an empty class."""
    for name in ("b/1.jpg", "b/0.JPEG", "a/x/2.jpg", "a/1.png"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg() if "p" in path.suffix.lower()[1:2] else png(b"x"))
    (root / "a/1.png").write_bytes(png(b"x"))
    (root / "a/notes.txt").write_text("no image")
    (root / "top.jpg").write_bytes(jpeg())
    (root / "c").mkdir()
    return root


def test_labels_are_the_sorted_top_folders(tmp_path: Path) -> None:
    """As torchvision numbers them; nested files belong to the top folder; others are counted."""
    found = ImageFolder(tree(tmp_path))
    items = [found.load(i) for i in range(found.length)]
    assert [(item.name, item.sample and item.sample["label"]) for item in items] == [
        ("a/1.png", 0),
        ("a/x/2.jpg", 0),
        ("b/0.JPEG", 1),
        ("b/1.jpg", 1),
    ]
    assert found.classes == ["a", "b", "c"]
    assert found.ignored == 2  # notes.txt, top.jpg


def test_files_are_read_in_the_order_asked_for(tmp_path: Path) -> None:
    """Concurrent reads by the event loop come back in order, for any number of workers."""
    tree(tmp_path)
    for number in range(200):
        (tmp_path / f"b/{number:05d}.jpg").write_bytes(jpeg(str(number).encode()))
    found = ImageFolder(tmp_path)
    order = [*range(found.length)][::-1]
    wanted = [found.load(index) for index in order]
    for workers in (1, 7):
        assert list(found.read(order, workers)) == wanted


def test_a_folder_without_classes_has_no_labels(tmp_path: Path) -> None:
    """Only images: a flat folder."""
    (tmp_path / "0.jpg").write_bytes(jpeg())
    assert list(ImageFolder(tmp_path).fields) == ["image"]


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    """A link to a parent ends; a link that leads nowhere is a record that cannot be read."""
    tree(tmp_path / "root")
    os.symlink(tmp_path / "root", tmp_path / "root/a/loop")
    os.symlink(tmp_path / "gone.jpg", tmp_path / "root/a/dead.jpg")
    os.symlink("itself.jpg", tmp_path / "root/a/itself.jpg")
    os.symlink("itself", tmp_path / "root/itself")
    found = ImageFolder(tmp_path / "root")
    items = {item.name: item for item in found.read(range(found.length), 4)}
    for name in ("dead", "itself"):
        assert "cannot be read" in items[f"a/{name}.jpg"].problem
    assert not any(name.count("loop") > 1 for name in items)


def test_the_fingerprint_sees_every_change(tmp_path: Path) -> None:
    """A file more, one less, one changed, one renamed: another source."""
    tree(tmp_path)
    seen = {ImageFolder(tmp_path).fingerprint()}
    assert ImageFolder(tmp_path).fingerprint() in seen
    (tmp_path / "a/new.jpg").write_bytes(jpeg())
    seen.add(ImageFolder(tmp_path).fingerprint())
    (tmp_path / "a/new.jpg").write_bytes(jpeg(b"longer"))
    seen.add(ImageFolder(tmp_path).fingerprint())
    (tmp_path / "a/new.jpg").rename(tmp_path / "b/new.jpg")
    seen.add(ImageFolder(tmp_path).fingerprint())
    assert len(seen) == 4


def test_what_is_no_folder_of_images_is_said(tmp_path: Path) -> None:
    """A file, a missing folder, a folder without images."""
    (tmp_path / "f").write_text("x")
    for where in (tmp_path / "f", tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match=str(where)):
            ImageFolder(where)


def test_the_fingerprint_of_files_is_that_of_their_json() -> None:
    """Names of any characters; an ingest that an older hpstore began goes on with the same."""
    files = [
        (name, number, 10**18 + number) for number, name in enumerate(['a"b', "ä/\udcff", "\n"])
    ]
    plain = digest_of(["images", ["a"], *map(list, files)])
    assert digest_of(["images", ["a"]], files) == plain
    assert digest_of(["images", ["a"]], files[:2]) != plain
