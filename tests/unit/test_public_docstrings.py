"""Public docstrings have sections: what a caller gives is under Parameters, name by name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest

from hpstore.pool.admin import PoolAdmin
from hpstore.pool.pool_devices import PoolDevices

PACKAGES = (
    "hpstore",
    "hpstore.loaders",
    "hpstore.trainers",
    "hpstore.interop.zarr",
)
EXTRAS = ("accelerate", "ignite", "lightning", "torch_checkpointing", "transformers")

# classes whose methods another library calls and describes; but for those of our own named here
PROTOCOLS: dict[str, tuple[str, frozenset[str]]] = {
    "DatasetStore": ("zarr's Store", frozenset({"has"})),
    "PoolCheckpointIO": ("Lightning's CheckpointIO", frozenset({"file"})),
    "PoolStorage": ("torch_checkpointing's Storage", frozenset()),
    "PoolStore": ("zarr's Store", frozenset({"from_url"})),
    "PoolTrainerCallback": ("transformers' TrainerCallback", frozenset({"resume_folder"})),
    "RequireUsedIO": ("Lightning's Callback", frozenset()),
}

# classes that callers get and do not make: comments of their fields are enough
RESULTS = {
    *(
        "DatasetInfo",
        "DatasetReport",
        "DatasetVersion",
        "IngestProgress",
        "IngestReport",
        "PartsProgress",
        "PartsReport",
        "StepRecord",
    ),
    *("DeviceStatus", "ObjectInfo", "PoolStatus", "Progress", "RebuildReport", "VersionInfo"),
    "HpstoreError",
}

# methods that hand their arguments on: their docstrings name the one that describes them
DELEGATES: dict[str, Callable[..., object]] = {
    "status": PoolAdmin.status,
    "scrub": PoolAdmin.scrub,
    "rebuild": PoolAdmin.rebuild,
    "add_device": PoolDevices.add,
    "evict": PoolDevices.evict,
    "drain": PoolDevices.drain,
    "readmit": PoolDevices.readmit,
    "sit_out": PoolDevices.sit_out,
}
CALLED_BY_ITERATORS = ("keep_ready",)  # of a DataLoader, public to its modules


@pytest.fixture(scope="module", autouse=True)
def adapters() -> None:
    """What hpstore.trainers needs; imported by the first test, not when tests are collected."""
    for package in EXTRAS:
        pytest.importorskip(package)


def public_names() -> Iterator[tuple[str, Any]]:
    """Classes and functions that the packages export."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            if not inspect.ismodule(getattr(module, name)):
                yield name, getattr(module, name)


def taken(made: Callable[..., object]) -> list[str]:
    """Names of what a caller gives."""
    return [name for name in inspect.signature(made).parameters if name not in ("self", "cls")]


def own_methods(name: str, kind: type) -> Iterator[tuple[str, FunctionType]]:
    """Public methods, with the class that has them, without those of another library."""
    _, ours = PROTOCOLS.get(name, ("", None))
    for method in dir(kind):
        owner = next(base for base in kind.__mro__ if method in vars(base))
        found = vars(owner)[method]
        found = getattr(found, "__func__", found)  # of class and static methods
        if method.startswith("_") or not isinstance(found, FunctionType):
            continue
        if owner.__module__.startswith("hpstore.") and (ours is None or method in ours):
            yield f"{owner.__module__}.{owner.__qualname__}", found


def sections(docstring: str, *titles: str) -> str:
    """What these sections of a docstring hold; "" when there is none."""
    found, lines = [], docstring.splitlines()
    for number, line in enumerate(lines[:-1]):
        if line in titles and lines[number + 1] == "-" * len(line):
            body = lines[number + 2 :]
            ends = [at for at, text in enumerate(body) if text.startswith("---")]
            found += body[: ends[0] - 1] if ends else body
    return "\n".join(found)


def lacking(made: Callable[..., object]) -> list[str]:
    """Parameters that no section describes."""
    said = sections(inspect.getdoc(made) or "", "Parameters", "Attributes").splitlines()
    named = {name.strip("* ") for line in said if line[:1].strip() for name in line.split(",")}
    return [name for name in taken(made) if name not in named]


def handed_on(method: FunctionType) -> list[str]:
    """As lacking(), of a method whose docstring says where its arguments are described."""
    target = DELEGATES[method.__name__]
    said = f"see {target.__qualname__}" in (inspect.getdoc(method) or "")
    return [name for name in taken(method) if not said or name in lacking(target)]


def undescribed() -> dict[str, list[str]]:
    """Public names by where they are, with their parameters that no section describes."""
    found: dict[str, list[str]] = {}
    for name, made in public_names():
        place = f"{made.__module__}.{made.__qualname__}"
        if inspect.isclass(made):
            if name not in RESULTS and vars(made).get("_is_protocol") is not True:
                found[place] = lacking(made)
            for owner, method in own_methods(name, made):
                if name == "Pool" and method.__name__ in DELEGATES:
                    found[f"{owner}.{method.__name__}"] = handed_on(method)
                elif method.__name__ not in CALLED_BY_ITERATORS:
                    found[f"{owner}.{method.__name__}"] = lacking(method)
        else:
            found[place] = lacking(made)
    return {place: names for place, names in found.items() if names}


def test_sections_are_found() -> None:
    """Guards the tests below against finding nothing."""

    def good(one: int, two: int, *rest: int) -> None:
        """A line.

        Parameters
        ----------
        one, two
            Numbers.
        *rest
            More.

        Returns
        -------
        three
            One.
        """

    def bad(one: int, three: int) -> None: ...

    bad.__doc__ = good.__doc__
    assert lacking(good) == []
    assert lacking(bad) == ["three"]
    assert len(list(public_names())) > 30
    assert len(list(own_methods("DatasetWriter", dict(public_names())["DatasetWriter"]))) > 3


def test_what_a_caller_gives_is_in_a_section() -> None:
    """Of every exported function, class and method of ours; each parameter by its name."""
    assert undescribed() == {}


@pytest.mark.parametrize("name", sorted({*PROTOCOLS, *RESULTS}))
def test_what_is_exempt_is_exported(name: str) -> None:
    kind = dict(public_names())[name]
    assert all(hasattr(kind, method) for method in PROTOCOLS.get(name, ("", ()))[1])
