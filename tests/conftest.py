"""What all tests share: hypothesis profiles, the `root` marker, time that tests move."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import hpstore
from hpstore.config import Settings
from hpstore.devices import reserve
from hpstore.units import MIB
from tests.s3_servers import S3Server, needed
from tests.thorough import LONG

# the contract's assertions show their values, as those in test files do
pytest.register_assert_rewrite("hpstore.testing.device_contract", "hpstore.testing.direct_contract")

# what the ranks of the tests need (tests/integration/ranks.py): their server imports it once, not
# each of some hundred processes. torch imports torch._dynamo when it makes its first optimizer
multiprocessing.set_forkserver_preload(["torch._dynamo", "tests.trainers.runs"])

# keepers would outlive the tests; those that are about them switch it on
os.environ.setdefault("HPSTORE_NODE_MEMORY", "off")

_SLOW = [HealthCheck.too_slow]
settings.register_profile("dev", max_examples=25, deadline=None, suppress_health_check=_SLOW)
settings.register_profile(
    "ci",
    max_examples=40 if LONG else 25,
    derandomize=True,
    deadline=None,
    suppress_health_check=_SLOW,
)
settings.register_profile(
    "nightly", max_examples=2000, print_blob=True, deadline=None, suppress_health_check=_SLOW
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `root`, with the reason, for everybody else."""
    if os.geteuid() == 0:
        return
    for item in items:
        if item.get_closest_marker("root"):
            item.add_marker(pytest.mark.skip(reason="needs root (loop devices, mounts)"))


def pytest_collection_finish() -> None:
    """Out of the collector's sight, what was imported: torch's modules cost each full collection
    0.2 s, of which a run makes hundreds. What tests make it sees as ever."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server of this run; without the program, a skip that says so."""
    if lack := needed():
        pytest.skip(lack)
    server = S3Server(tmp_path_factory.mktemp("s3") / "server")
    yield server
    server.stop()


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[hpstore.Pool]:
    """3+2 over five directories; its settings are `pool.toml` beside them."""
    with hpstore.create(
        [tmp_path / f"d{i}" for i in range(5)],
        data=3,
        parity=2,
        config=tmp_path / "pool.toml",
        settings=Settings(memory_bytes=32 * MIB, run_directory=str(tmp_path / "run")),
    ) as made:
        yield made


@pytest.fixture
def segments_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves of this process put their tensors into segments, however small they are: as large ones
    do, which these tests stand for."""
    from hpstore.checkpoint.save import rank_plan

    monkeypatch.setattr(rank_plan, "WITHIN_BYTES", -1)


@pytest.fixture(autouse=True)
def spare_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of this process makes as few spare files as on a small filesystem: 64 on each are
    half of what a pool of five directories costs. What is about them has a fixture of this name."""
    monkeypatch.setattr(reserve, "SPARES_MOST", reserve.SPARES_LEAST)


@pytest.fixture(autouse=True)
def _log_level_as_before() -> Iterator[None]:
    """What a test does to our logger's level, or a benchmark that it runs, ends with it."""
    logger = logging.getLogger("hpstore")
    before = logger.level
    yield
    logger.setLevel(before)
