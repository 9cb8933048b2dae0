"""Public signatures of hpstore.checkpoint: what all of them have in common."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import hpstore.checkpoint as public

MADE_BY_US = (
    "Report",
    "Manifest",
    "Handle",
    "SavedStep",
    "SavedTensor",
    "Steps",
    "Preempted",
    "StepDecision",
    "RetentionRule",
    "Rollback",
    "StepDiff",
    "Tiers",
)
SIZES = ("memory", "_bytes")


def signatures() -> Iterator[tuple[str, inspect.Signature]]:
    """Of functions, of classes that users make, and of the methods of all classes."""
    for name in public.__all__:
        thing: Any = getattr(public, name)  # Any: classes and functions
        if not inspect.isclass(thing):
            yield name, inspect.signature(thing)
            continue
        if not name.endswith(MADE_BY_US):
            yield name, inspect.signature(thing)
        for method, call in vars(thing).items():
            if inspect.isfunction(call) and not method.startswith("_"):
                yield f"{name}.{method}", inspect.signature(call)


def sizes(found: Iterator[tuple[str, inspect.Signature]]) -> dict[str, str]:
    """Arguments that are sizes, with what they take."""
    return {
        f"{name}({word})": str(parameter.annotation)
        for name, signature in found
        for word, parameter in signature.parameters.items()
        if word.endswith(SIZES)
    }


def test_every_size_takes_a_text() -> None:
    """A number of bytes, or "64MiB": what takes a number alone is found."""
    found = sizes(signatures())
    assert {"SaveOptions(memory)", "export_checkpoint(max_shard_bytes)"} <= found.keys()
    assert [name for name, takes in found.items() if "str" not in takes] == []


def test_a_size_that_takes_numbers_alone_is_found() -> None:
    """Guards the test above."""

    def call(limit_bytes: int) -> None: ...

    assert sizes(iter([("call", inspect.signature(call))])) == {"call(limit_bytes)": "int"}


# torch's own protocols: how they are called is not ours to say
PROTOCOLS = (public.StorageReader, public.StorageWriter, public.SafeLoadPlanner)


def described() -> Iterator[tuple[str, object]]:
    """What users call with arguments: functions, classes that they make, methods."""
    for name in public.__all__:
        thing: Any = getattr(public, name)  # Any: classes and functions
        if (
            name != "SafeLoadPlanner"
            and not name.endswith(MADE_BY_US)
            and inspect.signature(thing).parameters
        ):
            yield name, thing
        for method, call in vars(thing).items() if inspect.isclass(thing) else ():
            if not inspect.isfunction(call) or method.startswith("_") or thing in PROTOCOLS:
                continue
            if (
                not name.endswith(("Report", "Manifest"))
                and len(inspect.signature(call).parameters) > 1
            ):
                yield f"{name}.{method}", call


# short forms: their docstrings name the method of `steps` that describes the arguments
SHORT = {f"Checkpointer.{name}": f"Steps.{name}" for name in ("watch", "verify", "delete")}


def test_short_forms_name_the_long_ones() -> None:
    for short, long in SHORT.items():
        method = getattr(public.Checkpointer, short.partition(".")[2])
        assert f"see {long}" in (inspect.getdoc(method) or "")


def test_public_calls_with_arguments_say_what_these_are() -> None:
    """Each has a section Parameters, or names the one that has."""
    found = {name: call for name, call in described() if name not in SHORT}
    assert set(SHORT.values()) <= set(found)
    assert {"Checkpointer.save", "StorageWriter", "Stager.stage", "SaveHandle.result"} <= set(found)
    lacking = [n for n, call in found.items() if "Parameters\n" not in (inspect.getdoc(call) or "")]
    assert lacking == []
