"""Names that a restore drops inside of lists: a list is taken, a key of a dict in it may not be.

Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hpstore.checkpoint.state.module_state import module_state
from hpstore.checkpoint.state.plain_values import JSON_TYPES, is_plain
from hpstore.checkpoint.state.state_tree import PerRank, join
from hpstore.checkpoint.state.typed_objects import grows

_SEQUENCES = (list, tuple, deque)


def dropped(target: Any, loaded: Any, rank: int, path: str = "", *, inside: bool) -> Iterator[str]:
    """Paths of loaded values for which a dict or module in a list of the state has no such name.

    `inside`: this is in a list. A list of another length is replaced, and drops nothing.
    """
    if isinstance(target, PerRank):
        target, path = target.value, f"{path}@{rank}"
    if isinstance(target, torch.nn.Module) and isinstance(loaded, Mapping):
        names = module_state(target) if inside else loaded
        yield from (join(path, name) for name in loaded if name not in names)
    elif isinstance(target, dict) and isinstance(loaded, Mapping):
        for name, value in loaded.items():
            if name not in target:
                if inside and not grows(target):
                    yield join(path, name)
            elif type(value) not in JSON_TYPES:  # of which there may be very many
                yield from dropped(target[name], value, rank, join(path, name), inside=inside)
    elif isinstance(target, _SEQUENCES) and isinstance(loaded, _SEQUENCES):
        alike = len(target) == len(loaded) and not is_plain(target)
        for number, mine in enumerate(target if alike else ()):
            yield from dropped(mine, loaded[number], rank, join(path, number), inside=True)
