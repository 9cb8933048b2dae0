"""zarr's own test suites, over a Pool and over a pool's name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import zarr
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from zarr.core.buffer import Buffer, cpu
from zarr.testing.stateful import ZarrHierarchyStateMachine, ZarrStoreStateMachine
from zarr.testing.store import StoreTests

import hpstore
from hpstore.interop.zarr import PoolStore
from hpstore.testing.memory_pool import Harness

PREFIX = "a/zarr"
STATEFUL = settings(
    max_examples=5, stateful_step_count=15, suppress_health_check=list(HealthCheck), deadline=None
)


class TestOverPool(StoreTests[PoolStore, cpu.Buffer]):
    """zarr's store tests, over an open Pool."""

    store_cls = PoolStore
    buffer_cls = cpu.Buffer
    pool: hpstore.Pool

    @pytest.fixture
    def store_kwargs(self, pool: hpstore.Pool) -> dict[str, Any]:
        return {"pool": pool, "prefix": PREFIX}

    @pytest.fixture
    def store(self, open_kwargs: dict[str, Any]) -> PoolStore:  # theirs need a plugin
        return asyncio.run(PoolStore.open(**open_kwargs))

    @pytest.fixture
    def store_not_open(self, store_kwargs: dict[str, Any]) -> PoolStore:
        return PoolStore(**store_kwargs)

    @pytest.fixture(autouse=True)
    def _beside(self, pool: hpstore.Pool) -> Iterator[None]:
        """The pool that values are put into and looked for, past the store."""
        self.pool = pool
        yield
        assert all(key.startswith(f"{PREFIX}/") for key in pool.list())

    async def set(self, store: PoolStore, key: str, value: Buffer) -> None:
        self.pool.put(f"{PREFIX}/{key}", value.to_bytes())

    async def get(self, store: PoolStore, key: str) -> Buffer:
        return self.buffer_cls.from_bytes(self.pool.get(f"{PREFIX}/{key}"))

    def test_store_repr(self, store: PoolStore) -> None:
        assert repr(store) == f"PoolStore('hpstore://test/{PREFIX}')"

    def test_store_supports_writes(self, store: PoolStore) -> None:
        assert store.supports_writes
        assert store.supports_deletes

    def test_store_supports_listing(self, store: PoolStore) -> None:
        assert store.supports_listing


class TestOverName(TestOverPool):
    """zarr's store tests, over a pool's name."""

    @pytest.fixture
    def store_kwargs(self, pool: hpstore.Pool, name: str) -> dict[str, Any]:
        return {"pool": name, "prefix": PREFIX}


@pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")  # any dtype
@pytest.mark.parametrize("machine", [ZarrStoreStateMachine, ZarrHierarchyStateMachine])
def test_any_sequence_of_operations_ends_as_in_memory(
    machine: type[ZarrStoreStateMachine], harness: Harness
) -> None:
    """zarr's state machines compare a store with a dict and with a MemoryStore."""
    with harness.open(threads=True) as pool, zarr.config.set({"async.concurrency": 4}):
        store = PoolStore(pool, PREFIX)

        class Machine(machine):  # type: ignore[misc, valid-type]  # chosen above
            def __init__(self) -> None:
                super().__init__(store)

        run_state_machine_as_test(Machine, settings=STATEFUL)
