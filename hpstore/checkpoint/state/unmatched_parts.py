"""What a restore with strict=False leaves inside of lists and objects, which are taken as a whole.

A key of a dict in a list may not be in the state, nor an attribute of a namespace, nor a part of a
container that holds objects and is not alike. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hpstore.checkpoint.state.held_objects import (
    grows,
    holds_objects,
    is_alike,
    is_object,
    is_sequence,
    named_parts,
)
from hpstore.checkpoint.state.module_state import module_state
from hpstore.checkpoint.state.plain_values import JSON_TYPES, is_plain
from hpstore.checkpoint.state.state_tree import PerRank, join
from hpstore.checkpoint.state.typed_objects import children_of, is_namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmatched:
    """A path that only one side has: `recorded`, or else wanted."""

    path: str
    recorded: bool


def unmatched(
    target: Any, loaded: Any, rank: int, path: str = "", *, inside: bool = False
) -> Iterator[Unmatched]:
    """Paths of loaded values that nothing in a list or object of the state takes, and of what in
    there gets none.

    `inside`: this is in a list. A list of another length without objects is replaced as a whole.
    """
    if isinstance(target, PerRank):
        target, path = target.value, f"{path}@{rank}"
    if isinstance(target, torch.nn.Module) and isinstance(loaded, Mapping):
        names = module_state(target) if inside else loaded
        yield from (_recorded(join(path, name)) for name in loaded if name not in names)
    elif is_object(target) or isinstance(target, torch.Tensor):
        return
    elif isinstance(target, dict) and isinstance(loaded, Mapping):
        for name, value in loaded.items():
            if name not in target:
                if inside and not grows(target):
                    yield _recorded(join(path, name))
            elif type(value) not in JSON_TYPES or type(target[name]) not in JSON_TYPES:
                # numbers and text alone are passed over: there may be very many
                yield from unmatched(target[name], value, rank, join(path, name), inside=inside)
    elif is_alike(target, loaded):
        if not (is_sequence(target) and is_plain(target)):
            yield from _parts(path, target, loaded, rank, named=is_namespace(target))
    elif holds_objects(target):
        if children_of(loaded) is None:
            yield _recorded(path)
        yield from _parts(path, target, loaded, rank, named=True)


def _parts(path: str, target: Any, loaded: Any, rank: int, *, named: bool) -> Iterator[Unmatched]:
    """As unmatched(), of what is inside. `named`: a part that only one side has is left."""
    mine, saved = named_parts(target), named_parts(loaded)
    for name, value in saved.items():
        if name in mine:
            yield from unmatched(mine[name], value, rank, join(path, name), inside=True)
        elif named:
            yield _recorded(join(path, name))
    for name in mine.keys() - saved.keys() if named else ():
        if not isinstance(mine[name], (torch.nn.Module, dict)):  # found by what is in them
            yield Unmatched(path=join(path, name), recorded=False)


def _recorded(path: str) -> Unmatched:
    return Unmatched(path=path, recorded=True)
