"""Images are decoded when asked: equal to Pillow's, bounded, damaged ones named or skipped."""

from __future__ import annotations

import contextlib
import io
import pickle
import struct
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpstore.errors import ConfigError, IntegrityError
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field, ImageDecode
from hpstore.loaders.dataset.image_decode import decode_image
from hpstore.pool.pool import Pool
from tests.integration.ingest_cases import make_pool

pillow = pytest.importorskip("PIL.Image", reason="needs Pillow (the extra `images`)")

FIELDS = {"image": Field("image"), "raw": Field("bytes"), "n": Field("int64")}


def pixels(number: int, width: int = 20, height: int = 12) -> Any:
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)


def encoded(array: Any, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    pillow.fromarray(array).save(out, kind, **options)
    return out.getvalue()


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with make_pool(tmp_path) as made:
        yield made


def write(pool: Pool, images: list[bytes | None], field: Field = FIELDS["image"]) -> Dataset:
    fields = {**FIELDS, "image": field}
    with DatasetWriter(pool, "d", fields) as writer:
        for n, image in enumerate(images):
            writer.write({"image": image, "raw": image or b"", "n": n})
    return Dataset(pool, "d")


def test_images_are_bytes_until_they_are_decoded(pool: Pool) -> None:
    """As samples and in batches: the bytes as written, tensors chw or hwc where asked, by field."""
    arrays = [pixels(n) for n in range(5)]
    data = write(pool, [encoded(array) for array in arrays])
    assert data[2]["image"] == encoded(arrays[2])
    batch = next(iter(DataLoader(data, 5)))
    assert batch["image"][1].numpy().tobytes() == encoded(arrays[1])
    batch = next(iter(DataLoader(data, 5, decode=True)))
    assert batch["image"].shape == (5, 3, 12, 20)
    assert batch["image"].dtype == torch.uint8
    assert np.array_equal(batch["image"].numpy(), np.stack(arrays).transpose(0, 3, 1, 2))
    assert batch["raw"][1].numpy().tobytes() == encoded(arrays[1])
    how: dict[str, bool | ImageDecode] = {"raw": ImageDecode(layout="hwc"), "image": True}
    with Dataset(pool, "d", decode=how) as opened:
        assert np.array_equal(opened[3]["raw"].numpy(), arrays[3])
        assert np.array_equal(opened[3]["image"].numpy(), arrays[3].transpose(2, 0, 1))
        batch = next(iter(DataLoader(opened, 2)))  # as the dataset has it
        assert np.array_equal(batch["raw"].numpy(), np.stack(arrays[:2]))
        assert pickle.loads(pickle.dumps(opened.decode)) == how
        sample = next(iter(DataLoader(opened, None)))
        assert np.array_equal(sample["raw"].numpy(), arrays[0])


@pytest.mark.parametrize("processes", [False, True])
def test_images_of_many_sizes_are_a_list_until_a_transform_makes_them_one(
    pool: Pool, processes: bool
) -> None:
    """Also where worker processes decode."""
    arrays = [pixels(n, width=10 + n) for n in range(6)]
    data = write(pool, [encoded(array) for array in arrays])
    options: dict[str, Any] = {"decode": True}
    if processes:
        options |= {"num_workers": 2, "multiprocessing_context": "fork"}
    with closing(DataLoader(data, 3, **options)) as loader:
        for start, batch in enumerate(loader):
            assert isinstance(batch["image"], list)
            for row, image in enumerate(batch["image"]):
                assert np.array_equal(image.numpy().transpose(1, 2, 0), arrays[3 * start + row])

    def cropped(sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "image": sample["image"][:, :8, :8]}

    with closing(DataLoader(data, 3, transform=cropped, **options)) as loader:
        assert [batch["image"].shape for batch in loader] == [(3, 3, 8, 8)] * 2


def test_optional_images_are_zeros_and_a_mask(pool: Pool) -> None:
    data = write(pool, [encoded(pixels(0)), None], Field("image", optional=True))
    batch = next(iter(DataLoader(data, 2, decode=True)))
    assert batch["image_mask"].tolist() == [True, False]
    assert not batch["image"][1].any()
    assert data[1]["image"] is None


def hostile() -> dict[str, bytes]:
    """A cut PNG and JPEG, no image, nothing, EPS, and a PNG that says 2^31 pixels a side."""
    head = struct.pack(">IIBBBBB", 1 << 20, 1 << 20, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + head
    bomb += struct.pack(">I", zlib.crc32(b"IHDR" + head))
    deep = io.BytesIO()
    pillow.fromarray(np.zeros((4, 4), np.uint16)).save(deep, "PNG")
    jpeg = encoded(pixels(0, 200, 100), "JPEG")
    return {
        "cut PNG": encoded(pixels(0))[:-40],
        "cut JPEG": jpeg[: len(jpeg) // 2],
        "noise": b"x" * 100,
        "nothing": b"",
        "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        "bomb": bomb,
        "16 bits": deep.getvalue(),
    }


@pytest.mark.parametrize("name", hostile())
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_what_is_no_good_image_is_named_or_skipped(
    pool: Pool, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By the number of the sample; others of its batch come. A batch of such alone does not."""
    good = encoded(pixels(1))
    data = write(pool, [good, hostile()[name], good, hostile()[name], hostile()[name], good])
    with pytest.raises(IntegrityError, match=r"sample 1 of data set 'd': field 'image' holds no"):
        Dataset(pool, "d", decode=True)[1]
    with (
        closing(DataLoader(data, 3, decode=True)) as loader,
        pytest.raises(IntegrityError, match=r"sample 1 \(position 1 of epoch 0\) cannot be decode"),
    ):
        next(iter(loader))
    for transform in (None, dict):
        options: dict[str, Any] = {"on_error": "skip", "transform": transform}
        with closing(DataLoader(data, 1, decode=True, **options)) as loader:
            assert [batch["n"].tolist() for batch in loader] == [[0], [2], [5]]
            assert loader.stats()["skipped_samples"] == 3
        with closing(DataLoader(data, 3, decode=True, **options)) as loader:
            batches = list(loader)
            assert [batch["n"].tolist() for batch in batches] == [[0, 2], [5]]
            assert [batch["image"].shape[0] for batch in batches] == [2, 1]
            assert batches[0]["raw"][1].numpy().tobytes() if transform is None else True
    assert "cannot be decoded, the sample is skipped" in caplog.text


def test_pixels_are_bounded_before_they_are_decoded() -> None:
    data = encoded(pixels(0))
    assert decode_image(data, ImageDecode(most_pixels=240)).shape == (3, 12, 20)
    with pytest.raises(ValueError, match="20 x 12 pixels, more than most_pixels=239"):
        decode_image(data, ImageDecode(most_pixels=239))


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM", "JPEG"])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
def test_every_format_is_what_pillow_makes_of_it(kind: str, mode: str) -> None:
    data = encoded(pixels(0), kind)
    wanted = np.array(pillow.open(io.BytesIO(data)).convert(mode)).reshape(12, 20, -1)
    found = decode_image(data, ImageDecode(mode=mode, layout="hwc"))
    assert np.array_equal(found.numpy(), wanted)


@pytest.mark.parametrize("grey", [False, True])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
def test_simplejpeg_makes_the_same_pixels(mode: str, grey: bool) -> None:
    pytest.importorskip("simplejpeg", reason="needs simplejpeg (the extra `images`)")
    array = pixels(0, 201, 99)
    data = encoded(array[:, :, 0] if grey else array, "JPEG", quality=80)
    one, two = (decode_image(data, ImageDecode(mode=mode, backend=b)) for b in ("pil", "auto"))
    assert torch.equal(one, two)
    with pytest.raises(ValueError, match="no JPEG"):
        decode_image(encoded(array), ImageDecode(backend="simplejpeg"))


@pytest.mark.parametrize(
    "decode", ["pil", 3, {"n": True}, {"gone": True}, {"image": "rgb"}, {"image": False}]
)
def test_a_wrong_decode_is_refused(pool: Pool, decode: Any) -> None:
    data = write(pool, [encoded(pixels(0))])
    with pytest.raises(ConfigError, match="decode"):
        DataLoader(data, decode=decode)
    with pytest.raises(ConfigError, match="decode"):
        Dataset(pool, "d", decode=decode)


@pytest.mark.parametrize(
    "options", [{"mode": "CMYK"}, {"layout": "nchw"}, {"backend": "dali"}, {"most_pixels": 0}]
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ImageDecode(**options)


def test_decode_is_for_images_and_for_hpstore_s_datasets(pool: Pool) -> None:
    data = write(pool, [encoded(pixels(0))], Field("bytes"))
    with pytest.raises(ConfigError, match="no field is an image"):
        DataLoader(data, decode=True)
    with pytest.raises(ConfigError, match="decode"):
        DataLoader([1, 2], decode=True)


@given(st.binary(max_size=200), st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"]))
@pytest.mark.filterwarnings("ignore")
def test_damage_is_an_image_or_a_value_error(noise: bytes, kind: str) -> None:
    """Nothing else, whatever was written over the middle of a file."""
    data = bytearray(encoded(pixels(0), kind))
    at = len(data) // 3
    data[at : at + len(noise)] = noise
    with contextlib.suppress(ValueError):
        assert decode_image(bytes(data), ImageDecode(most_pixels=4000)).dtype == torch.uint8
