"""What torch_save_to_dcp cannot remove in a pool changes nothing about what it has committed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hpstore
from hpstore.checkpoint import dcp_to_torch_save, torch_save_to_dcp
from hpstore.checkpoint.convert import dcp_directories, dcp_objects
from hpstore.errors import RedundancyError, TooFewDevices
from hpstore.pool.pool import Pool
from tests.interop.named_pool import make_named_pool

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # no_dist=True


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where a checkpoint of ones is."""
    make_named_pool(tmp_path, monkeypatch)
    for name, value in (("ones", 1.0), ("twos", 2.0)):
        torch.save({"a": torch.full((3,), value)}, tmp_path / f"{name}.pt")
    torch_save_to_dcp(tmp_path / "ones.pt", "hpstore://dcps/ckpt")
    return "hpstore://dcps/ckpt"


@pytest.fixture
def undeletable(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Until it is called, no delete succeeds; one that fails so may yet become visible."""
    delete = Pool.delete

    def refused(pool: Pool, key: str, *args: Any, **options: Any) -> Any:
        raise TooFewDevices(f"{key} stays")

    monkeypatch.setattr(Pool, "delete", refused)
    return lambda: monkeypatch.setattr(Pool, "delete", delete)


def value(url: str, tmp_path: Path) -> float:
    dcp_to_torch_save(url, tmp_path / "back.pt")
    return float(torch.load(tmp_path / "back.pt")["a"][0])


def test_a_delete_that_fails_after_the_commit_is_no_error(
    url: str, tmp_path: Path, undeletable: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The caller took it for a failure and threw its own file away, or tried again."""
    torch_save_to_dcp(tmp_path / "twos.pt", url)
    assert "stays for now" in caplog.text
    assert value(url, tmp_path) == 2.0
    with hpstore.open(tmp_path / "pool.toml") as pool:
        assert len(pool.list("ckpt/")) == 3  # .metadata, new data, old data
        undeletable()
        torch_save_to_dcp(tmp_path / "ones.pt", url)
        assert len(pool.list("ckpt/")) == 2
    assert value(url, tmp_path) == 1.0


@pytest.mark.usefixtures("undeletable")
@pytest.mark.parametrize("where", ["while it writes", "at the commit"])
def test_the_first_error_is_the_one_that_is_raised(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Not that of removing what was written until then."""

    def broken(*_: object) -> None:
        raise RedundancyError("the cause")

    if where == "at the commit":
        monkeypatch.setattr(dcp_objects, "_commit", broken)
    else:
        monkeypatch.setattr(dcp_directories.OneByOne, "require_all", broken)
    with pytest.raises(RedundancyError, match="the cause"):
        torch_save_to_dcp(tmp_path / "twos.pt", url)
    assert value(url, tmp_path) == 1.0
