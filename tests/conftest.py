"""What all tests share: hypothesis profiles, the `root` marker, time that tests move."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# the contract's assertions show their values, as those in test files do
pytest.register_assert_rewrite("hpstore.testing.device_contract", "hpstore.testing.direct_contract")

_SLOW = [HealthCheck.too_slow]
settings.register_profile("dev", max_examples=25, deadline=None, suppress_health_check=_SLOW)
settings.register_profile(
    "ci", max_examples=100, derandomize=True, deadline=None, suppress_health_check=_SLOW
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


@pytest.fixture(autouse=True)
def _log_level_as_before() -> Iterator[None]:
    """What a test does to our logger's level, or a benchmark that it runs, ends with it."""
    logger = logging.getLogger("hpstore")
    before = logger.level
    yield
    logger.setLevel(before)
