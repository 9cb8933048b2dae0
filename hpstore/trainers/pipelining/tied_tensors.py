"""Tensors that several stages have and their owner keeps equal: under one name, or under several,
as the embedding and the head of a language model are.

An optimizer's state has a tensor's first name alone, whichever of its names a stage knows: the
whole model in one stage would have it under that name, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hpstore.errors import ConfigError
from hpstore.format.checksum import digest128

Names = tuple[str, ...]
Mark = tuple[str, str]  # the first tied name of the same object on its rank, digest of its values


@dataclass(frozen=True, slots=True, kw_only=True)
class Tied:
    """`names`: all that were told, in order; `groups`: names of one tensor each, the first of which
    its moments have."""

    names: Names = ()
    groups: tuple[Names, ...] = ()

    @classmethod
    def of(cls, told: Iterable[str | Sequence[str]]) -> Tied:
        """What restore(tied=) was given: names, and groups of names."""
        names, groups = list[str](), list[Names]()
        for one in [told] if isinstance(told, str) else told:
            group = (one,) if isinstance(one, str) else tuple(map(str, one))
            names += group
            if len(group) > 1:
                groups.append(group)
        return cls(names=tuple(dict.fromkeys(names)), groups=tuple(groups))

    def group_of(self, name: str) -> Names:
        """All names of a tensor."""
        return next((group for group in self.groups if name in group), (name,))

    def with_found(
        self, held: Sequence[Mapping[str, Mark]], stages: Sequence[tuple[int, ...]]
    ) -> Tied:
        """With groups that follow from what ranks hold: names of one tensor on a rank, and two
        names of which each is on ranks of other stages alone, with equal values. Pure.

        `held`: by rank, what marks_of() gives; `stages`: by rank, to know replicas. Raises
        ConfigError, alike on all ranks, where such names have other values.
        """
        known = {name for group in self.groups for name in group}
        free = [name for name in self.names if name not in known]
        owners = {
            name: {stages[rank] for rank, mine in enumerate(held) if name in mine} for name in free
        }
        lone = [name for name in free if len(owners[name]) == 1]
        apart = len(lone) > 1 and len({next(iter(owners[name])) for name in lone}) == len(lone)
        if not apart:
            return Tied(names=self.names, groups=self.groups + _alike(free, held))
        values = {mine[name][1] for name in lone for mine in held if name in mine}
        if len(lone) > 2 or len(values) > 1:
            raise ConfigError(
                f"tied={tuple(self.names)!r}: no two ranks have {lone[0]!r}, nor {lone[1]!r}. "
                f"Where they are names of one tensor, put them in one tuple, tied=[({lone[0]!r}, "
                f"{lone[1]!r})], first the name that the whole model's parameters() has it by, and "
                "begin with equal values. Nothing was changed."
            )
        return Tied(names=self.names, groups=(*self.groups, tuple(lone)))

    def first_names(self) -> dict[str, str]:
        """By each further name of a tensor: the first."""
        return {name: group[0] for group in self.groups for name in group[1:]}

    def require_one(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise ConfigError where one rank has two tensors for one group."""
        for group in self.groups:
            found = [tensors[name] for name in group if name in tensors]
            if any(one is not found[0] for one in found):
                raise ConfigError(
                    f"{', '.join(group)} are names of one tensor, and two stages of this rank have "
                    "one each: let both have the same Parameter. Nothing was changed."
                )


def _alike(names: Sequence[str], held: Sequence[Mapping[str, Mark]]) -> tuple[Names, ...]:
    """Names that are one tensor on a rank."""
    found: dict[str, dict[str, None]] = {}
    for mine in held:
        for name in names:
            if name in mine:
                found.setdefault(mine[name][0], {})[name] = None
    return tuple(tuple(group) for group in found.values() if len(group) > 1)


def marks_of(tied: Tied, tensors: Mapping[str, torch.Tensor]) -> dict[str, Mark]:
    """Of this rank's tied tensors, by name."""
    first: dict[int, str] = {}
    found: dict[str, Mark] = {}
    for name in tied.names:
        if name not in tensors:
            continue
        local = tensors[name].detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        flat = local.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest = digest128(f"{tuple(local.shape)}".encode() + digest128(flat.data)).hex()
        found[name] = first.setdefault(id(tensors[name]), name), digest
    return found
