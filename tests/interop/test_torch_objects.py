"""torch.save and torch.load by URL: the plain idiom of timm and MONAI, on a pool."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import hpstore
from hpstore.checkpoint import torch_load, torch_save
from hpstore.errors import ConfigError, IntegrityError, MalformedFile
from hpstore.format import untrusted_bytes
from hpstore.units import MIB


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the objects of a pool of a name are."""
    monkeypatch.setenv("HPSTORE_POOLS", str(tmp_path / "names.toml"))
    places = [tmp_path / f"d{n}" for n in range(5)]
    config = tmp_path / "pool.toml"
    hpstore.create(places, data=3, parity=2, config=config, name="torches").close()
    return "hpstore://torches"


def state() -> dict[str, Any]:
    """As a training loop has it: shared and odd tensors, an optimizer."""
    torch.manual_seed(0)
    net = torch.nn.Linear(300, 200)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    shared = torch.arange(10.0)
    return {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "shared": [shared, shared[2:]],
        "empty": torch.zeros(0, 4, dtype=torch.bfloat16),
    }


def same(one: Any, two: Any) -> bool:
    """Bit by bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[k], two[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(same(a, b) for a, b in zip(one, two, strict=True))
    return bool(one == two)


def test_what_was_saved_comes_back_with_two_devices_gone(url: str, tmp_path: Path) -> None:
    """The very values and sharing; also by torch.load over fsspec, in another process."""
    saved = state()
    torch_save(saved, f"{url}/runs/last.pth")
    for name in ("d1", "d3"):
        shutil.rmtree(tmp_path / name)
    found = torch_load(f"{url}/runs/last.pth", "cpu")
    assert same(found, saved)
    found["shared"][0][5] = -1.0
    assert found["shared"][1][3] == -1.0
    with fsspec.open(f"{url}/runs/last.pth", "rb") as stream:
        assert same(torch.load(stream, weights_only=True), saved)
    code = (
        "import sys; from hpstore.checkpoint import torch_load\n"
        "print(torch_load(sys.argv[1])['epoch'])"
    )
    run = [sys.executable, "-c", code, f"{url}/runs/last.pth"]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "3\n"


def test_a_save_that_fails_leaves_the_one_before(url: str) -> None:
    """What cannot be pickled is met in the middle of the file."""
    torch_save({"epoch": 1}, f"{url}/last.pth")
    with pytest.raises(Exception, match="pickle"):
        torch_save({"big": torch.ones(300_000), "no": lambda: 0}, f"{url}/last.pth")
    assert torch_load(f"{url}/last.pth") == {"epoch": 1}


def test_what_is_no_such_file_is_an_error_of_its_own(url: str, tmp_path: Path) -> None:
    """Nothing there, other bytes, half of a file, code in a pickle; what is no URL of an object."""
    with pytest.raises(FileNotFoundError):
        torch_load(f"{url}/nothing.pth")
    torch_save(state(), f"{url}/last.pth")
    with hpstore.open(tmp_path / "pool.toml") as pool:
        whole = pool.get("last.pth")
        for bad in (b"", b"PK\x03\x04 no", whole[: len(whole) // 2], bytes(5000)):
            pool.put("bad.pth", bad)
            with pytest.raises(IntegrityError, match=r"bad\.pth is not a torch\.save file"):
                torch_load(f"{url}/bad.pth")
    torch_save(Path("x"), f"{url}/object.pth")
    with pytest.raises(IntegrityError, match=r"(?i)weights"):
        torch_load(f"{url}/object.pth")
    assert torch_load(f"{url}/object.pth", weights_only=False) == Path("x")
    for wrong in ("last.pth", "/tmp/last.pth", "s3://bucket/key", "hpstore://", None):
        with pytest.raises(ConfigError, match="no URL of an object"):
            torch_save({}, wrong)  # type: ignore[arg-type]


def test_a_file_that_would_take_far_more_memory_is_refused(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch inflates members whole: 4 KiB of an enemy would become whatever they say."""
    monkeypatch.setattr(untrusted_bytes, "_INFLATED_BYTES", MIB)
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(8 * MIB))
    with hpstore.open(tmp_path / "pool.toml") as pool:
        pool.put("bomb.pth", bomb.getvalue())
    with pytest.raises(MalformedFile, match=r"bomb\.pth would take 8388608 bytes of memory"):
        torch_load(f"{url}/bomb.pth")
    broken = bytearray(whole_file(url, tmp_path))
    broken[100:140] = bytes(40)  # the archive's list of members is sound
    with hpstore.open(tmp_path / "pool.toml") as pool:
        pool.put("broken.pth", bytes(broken))
    with pytest.raises(IntegrityError, match=r"broken\.pth: torch\.load cannot read it"):
        torch_load(f"{url}/broken.pth")


def whole_file(url: str, directory: Path) -> bytes:
    """The bytes of a state that was saved."""
    torch_save(state(), f"{url}/last.pth")
    with hpstore.open(directory / "pool.toml") as pool:
        found: bytes = pool.get("last.pth")
    return found
