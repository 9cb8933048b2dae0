"""A pool that URLs find by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

import hpstore


def make_named_pool(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed 3+2 pool, `hpstore://dcps`, of a registry of this test alone."""
    monkeypatch.setenv("HPSTORE_POOLS", str(directory / "names.toml"))
    places = [directory / f"d{n}" for n in range(5)]
    hpstore.create(places, data=3, parity=2, config=directory / "pool.toml", name="dcps").close()
