"""How PoolStore finds the packages that show zarr something else than objects: by entry points."""

from __future__ import annotations

import asyncio
import logging

import pytest
from zarr.core.buffer import cpu

import hpstore
from hpstore.interop.zarr import PoolStore, view_registry
from tests.interop.zarr_cases import run_python


def test_stores_elsewhere_import_neither_torch_nor_loaders(disk_pool: hpstore.Pool) -> None:
    """The whole life of plain arrays, in a process of its own; under `data/` they come."""
    code = (
        "import asyncio, sys, zarr\n"
        "from hpstore.interop.zarr import PoolStore\n"
        "store = PoolStore('disk', 'runs/x')\n"
        "zarr.open_group(store, mode='w').create_array('a', data=__import__('numpy').ones(9))\n"
        "assert zarr.open_group(store, mode='r')['a'][3] == 1\n"
        "asyncio.run(store.clear())\n"
        "assert not {'torch', 'hpstore.loaders'} & set(sys.modules), sorted(sys.modules)\n"
        "assert not asyncio.run(PoolStore('disk', 'data').exists('train/zarr.json'))\n"
        "assert {'torch', 'hpstore.loaders'} <= set(sys.modules)\n"
    )
    run_python(code)


def test_loaders_name_both_without_importing_zarr() -> None:
    """`hpstore.loaders.DatasetStore` and `ZarrDataset` come with zarr when they are asked for."""
    code = (
        "import sys, hpstore.loaders as loaders\n"
        "assert 'zarr' not in sys.modules\n"
        "from hpstore.loaders import DatasetStore, ZarrDataset\n"
        "from hpstore.loaders.zarr_views.dataset_store import DatasetStore as store\n"
        "from hpstore.loaders.zarr_views.array_dataset import ZarrDataset as data\n"
        "assert (DatasetStore, ZarrDataset) == (store, data)\n"
        "assert {'DatasetStore', 'ZarrDataset'} <= set(loaders.__all__)\n"
        "assert not hasattr(loaders, 'Nonsense')\n"
    )
    run_python(code)


def test_an_installation_without_views_says_so_once(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Data sets are objects then, as before: nothing falls back in silence."""
    view_registry._registered.cache_clear()
    monkeypatch.setattr(view_registry, "distributions", list)
    try:
        with caplog.at_level(logging.WARNING, "hpstore"):
            for key in ("a", "b"):
                asyncio.run(PoolStore(pool, "data/x").set(key, cpu.Buffer.from_bytes(b"new")))
    finally:
        view_registry._registered.cache_clear()
    assert caplog.text.count("Install hpstore again") == 1
