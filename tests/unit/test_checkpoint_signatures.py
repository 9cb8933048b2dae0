"""Public signatures of hpstore.checkpoint: what all of them have in common."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import hpstore.checkpoint as public
from hpstore.checkpoint import SaveOptions, export_checkpoint

MADE_BY_US = ("Report", "Manifest", "Handle", "SavedStep", "SavedTensor", "Steps", "Preempted")
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


def test_public_calls_with_arguments_say_what_these_are() -> None:
    """Those of a Checkpointer and what it hands out: Parameters, or no argument at all."""
    calls: list[tuple[str, Callable[..., Any]]] = [("export_checkpoint", export_checkpoint)]
    for thing in (public.Checkpointer, public.Steps, public.SavedStep):
        calls += [
            (f"{thing.__name__}.{name}", call)
            for name, call in vars(thing).items()
            if inspect.isfunction(call) and not name.startswith("_")
        ]
    lacking = [
        name
        for name, call in calls
        if set(inspect.signature(call).parameters) - {"self"}
        and "Parameters\n" not in (inspect.getdoc(call) or "")
    ]
    assert lacking == []
    assert all("Parameters\n" in (inspect.getdoc(c) or "") for c in (SaveOptions, public.Best))
