"""What a loader saves: a few integers and what they refer to. Pure.

The size does not depend on the dataset, nor on ranks, workers and read-ahead: batches handed to
the user are counted, as samples of the whole job.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpstore.errors import ConfigError, FormatTooNew
from hpstore.loaders.sampling.order import Order

STATE_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """Position of a run. `fingerprints` are those of the datasets, in the order of the sources.

    `samples` counts the positions of the epoch that all ranks together have handed out. After
    the last batch of an epoch it is 0 and `epoch` is one more; `at_end` as long as the loop over
    that epoch has not asked for more: resumed, it finds the end first, as it would have.
    """

    fingerprints: tuple[str, ...]
    order: str
    seed: int
    epoch: int
    samples: int
    at_end: bool = False

    def to_dict(self) -> dict[str, object]:
        """For state_dict(): JSON types only, shared with nobody, below 10 us at any size."""
        return {
            "version": STATE_VERSION,
            "fingerprints": list(self.fingerprints),
            "order": self.order,
            "seed": self.seed,
            "epoch": self.epoch,
            "samples": self.samples,
            **({"at_end": True} if self.at_end else {}),
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, object]) -> LoaderState:
        """A saved state. FormatTooNew from a newer hpstore; ConfigError when it is none."""
        if not isinstance(raw, Mapping):
            raise ConfigError(f"not the state of a hpstore loader: a {type(raw).__name__}")
        version = raw.get("version")
        if isinstance(version, int) and version > STATE_VERSION:
            raise FormatTooNew(
                f"the loader's state has version {version}, this hpstore reads {STATE_VERSION}: "
                "nothing was loaded; upgrade to resume from it"
            )
        prints, order = raw.get("fingerprints"), raw.get("order")
        texts = [one for one in prints if isinstance(one, str)] if isinstance(prints, list) else []
        numbers = [_count(raw.get(name)) for name in ("seed", "epoch", "samples")]
        if version != STATE_VERSION or texts != prints or None in numbers or not _is_json(order):
            raise ConfigError(
                f"not the state of a hpstore loader, with {sorted(map(str, raw))}: none was loaded"
            )
        seed, epoch, samples = (number or 0 for number in numbers)
        at_end = raw.get("at_end") is True and epoch > 0 and not samples
        return cls(
            fingerprints=tuple(texts),
            order=str(order),
            seed=seed,
            epoch=epoch,
            samples=samples,
            at_end=at_end,
        )

    def require_same_run(
        self, *, fingerprints: Sequence[str], order: str, seed: int, length: int
    ) -> None:
        """Refuse a state that means other samples here. ConfigError shows both sides.

        World size, batch size, workers and read-ahead may differ: they are no part of it.
        """
        differences = []
        if list(self.fingerprints) != list(fingerprints):
            known = _both("data set", list(self.fingerprints), list(fingerprints))
            differences.append(f"{known} (Dataset(..., version=) opens one as it was before)")
        if self.seed != seed:
            differences.append(_both("seed", self.seed, seed))
        if self.order != order:
            differences += _order_differences(json.loads(self.order), json.loads(order))
        if not differences and self.samples > length:
            differences.append(_both("samples of an epoch", f"at least {self.samples}", length))
        if differences:
            raise ConfigError(
                "the saved state is of another run: " + "; ".join(differences) + ". "
                "Nothing was loaded, and the loader stands where it stood. Build the loader as it "
                "was when the state was saved, or start without the state."
            )


def order_text(order: Order) -> str:
    """Canonical JSON of an order's description: made once, compared as text."""
    return json.dumps(order.describe(), sort_keys=True, separators=(",", ":"))


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _is_json(value: object) -> bool:
    try:
        return isinstance(value, str) and json.loads(value) is not None
    except ValueError:
        return False


def _both(what: str, saved: object, here: object) -> str:
    return f"{what} {saved} was saved, {here} is set"


def _order_differences(saved: object, here: object, path: str = "order") -> list[str]:
    """Entries that differ, by name, with both values."""
    if isinstance(saved, dict) and isinstance(here, dict) and saved.get("kind") == here.get("kind"):
        found = []
        for name in sorted(saved.keys() | here.keys()):
            found += _order_differences(saved.get(name), here.get(name), f"{path} {name}")
        return found
    if isinstance(saved, list) and isinstance(here, list) and len(saved) == len(here):
        pairs = enumerate(zip(saved, here, strict=True))
        return [text for i, (a, b) in pairs for text in _order_differences(a, b, f"{path}[{i}]")]
    return [] if saved == here else [_both(path, _brief(saved), _brief(here))]


def _brief(value: object) -> object:
    return value.get("kind") if isinstance(value, dict) else value
