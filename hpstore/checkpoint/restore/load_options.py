"""What of a step is loaded, and how: the options of a restore."""

from __future__ import annotations

import glob
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from hpstore.checkpoint.restore.name_patterns import (
    Globs,
    Renaming,
    check_renaming,
    checked_patterns,
)
from hpstore.errors import ConfigError

Transform = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What is loaded: `ckpt.restore(state, load=LoadOptions(include="model/encoder.*"))`.

    Names are renamed first; all else goes by the names of the state, such as "model/0.weight" and
    "epoch". Those of an optimizer are "optimizer/param_groups" and, for each parameter,
    "optimizer/state/0.weight". They follow the renaming of their parameters by themselves.

    Parameters
    ----------
    rename
        Recorded names by patterns, {"model/old.*": "model/new.*"}, each `*` for the one in the same
        place, or a function of a recorded name. None as a new name leaves out.
    include
        Patterns of names to load, as for file names: "model/*", "model/layers.[0-5].*". A pattern
        means all that is under it at a slash, too: "model". Default: all.
    exclude
        Patterns of names not to load, though they are included.
    cast
        True: give tensors of other floating (or complex) dtypes to those of the state, rounded to
        their dtype; moments that had their parameter's dtype get its new one. Where no state is
        filled (load, tensors): the dtype of what floats. False: another dtype is an error.
    transform
        A function of a name and a tensor on the host, which is its own; it returns what is loaded
        instead, of any shape that fits. Or such functions by patterns. Each rank reads these
        tensors whole and keeps them in memory until all are ready.

    Raises
    ------
    ConfigError
        A value is not one of those above. It is a ValueError.
    """

    rename: Renaming | None = None
    include: Collection[str] | str | None = None
    exclude: Collection[str] | str | None = None
    cast: bool | torch.dtype = False
    transform: Transform | Mapping[str, Transform] | None = None

    def __post_init__(self) -> None:
        if self.rename is not None:
            check_renaming(self.rename)
        for word in ("include", "exclude"):
            if getattr(self, word) is not None:
                checked_patterns(word, getattr(self, word))
        if type(self.cast) is not bool and not isinstance(self.cast, torch.dtype):
            raise ConfigError(f"cast must be True, False or a dtype, not {self.cast!r}")
        if isinstance(self.cast, torch.dtype) and not self.cast.is_floating_point:
            raise ConfigError(f"cast must be a dtype of floating point, not {self.cast}")
        if self.transform is not None:
            _check_transform(self.transform)

    @property
    def chooses(self) -> bool:
        """Whether names are changed or left out."""
        return any(part is not None for part in (self.rename, self.include, self.exclude))

    @property
    def narrows(self) -> bool:
        """Whether names of state and step may differ by it: moments go with what is transformed."""
        return self.chooses or self.transform is not None


def _check_transform(value: object) -> None:
    """Raise ConfigError for what is neither a function nor functions by patterns."""
    calls = list(value.values()) if isinstance(value, Mapping) else [value]
    if not calls or not all(map(callable, calls)):
        raise ConfigError(
            "transform must be a function of a name and a tensor, or such functions by patterns, "
            f"not {value!r}"
        )
    if isinstance(value, Mapping):
        checked_patterns("transform", list(value))


class NameFilter:
    """Which names of the state include= and exclude= let through."""

    def __init__(self, load: LoadOptions) -> None:
        self._include = _globs("include", load.include)
        self._exclude = _globs("exclude", load.exclude)

    def lets(self, name: str) -> bool:
        """Whether a name is loaded."""
        if self._include is not None and not self._include.match(name):
            return False
        return self._exclude is None or not self._exclude.match(name)

    def unused(self, names: Collection[str]) -> list[str]:
        """Patterns of include= that mean none of these names."""
        return [] if self._include is None else self._include.unused(names)


def _globs(word: str, patterns: Collection[str] | str | None) -> Globs | None:
    return None if patterns is None else Globs(checked_patterns(word, patterns))


def checked_load(load: object, *, into_state: bool = True) -> LoadOptions:
    """`load`, by default the defaults. `into_state`: for tensors that are there, and have dtypes.
    Raises ConfigError for anything else."""
    if load is None:
        return LoadOptions()
    if not isinstance(load, LoadOptions):
        raise ConfigError(
            f"load= takes LoadOptions(...), not a {type(load).__name__}. Nothing was changed."
        )
    if into_state and isinstance(load.cast, torch.dtype):
        raise ConfigError(
            f"cast={load.cast}: the state says the dtypes, give cast=True. Nothing was changed."
        )
    if not into_state and load.cast is True:
        raise ConfigError("cast=True: there is no state that says a dtype, give one")
    return load


def model_alone(
    model: object, name: str, load: LoadOptions | None
) -> tuple[dict[str, Any], LoadOptions]:
    """A state that holds a model alone, and the options that load no more. Raises ConfigError."""
    options = checked_load(load)
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"a model is a torch.nn.Module, not a {type(model).__name__}")
    if not isinstance(name, str) or not all(name.split("/")):
        raise ConfigError(f"name must be a name in a state, such as 'model', not {name!r}")
    first, *below = reversed(name.split("/"))
    state: dict[str, Any] = {first: model}
    for part in below:
        state = {part: state}
    if options.include is None:
        options = replace(options, include=(glob.escape(name),))
    return state, options
