"""What the numbers of a field stand for: names of classes, units of times. Kept in a dataset's
metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpstore.loaders.dataset.fields import Field

CLASSES = "classes"
UNITS = "units"
MOST_CLASSES = 1 << 16
LABEL = "label"  # the field that image folders, whose classes are one list, have


# Any below: metadata is whatever a writer recorded
def class_names(metadata: Mapping[str, Any], fields: Sequence[str]) -> dict[str, list[str]]:
    """Names by field, in the order of their numbers; empty for what is not of this form.

    One list is that of the field `label`, as image folders record it.
    """
    found = metadata.get(CLASSES)
    if isinstance(found, list):
        found = {LABEL: found}
    if not isinstance(found, Mapping):
        return {}
    return {
        name: list(names)
        for name, names in found.items()
        if name in fields and isinstance(names, list) and all(isinstance(n, str) for n in names)
    }


def other_meaning(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], fields: Mapping[str, Field], *, more: bool
) -> str | None:
    """What the numbers of a field stand for that differs in two datasets with these metadata, such
    as "the classes of 'label'"; None where all stand for the same, or one of the two does not say.
    `more`: their classes may be more."""
    numbers = [name for name, made in fields.items() if made.dtype not in ("str", "bytes")]
    mine, others = class_names(ours, numbers), class_names(theirs, numbers)
    for name in mine.keys() & others.keys():
        found = others[name][: len(mine[name])] if more else others[name]
        if found != mine[name]:
            return f"the classes of {name!r}"
    return other_unit(ours, theirs, numbers)


def other_unit(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], fields: Sequence[str]
) -> str | None:
    """A field whose times have another unit, as other_meaning() says it; None where there is none
    for which both have one."""
    mine, others = _units(ours), _units(theirs)
    for name in fields:
        both = mine.get(name), others.get(name)
        if None not in both and both[0] != both[1]:
            return f"the unit of {name!r} ({both[0]} and {both[1]})"
    return None


def _units(metadata: Mapping[str, Any]) -> Mapping[str, str]:
    found = metadata.get(UNITS)
    return found if isinstance(found, Mapping) else {}


def feature_classes(features: Mapping[str, Any]) -> dict[str, list[str]]:
    """Names of the ClassLabel columns of Hugging Face's features, of single ones and in lists.

    `features`: the objects of `Dataset.features`, or the JSON that their files hold.
    """
    found = {}
    for name, feature in features.items():
        names = _names_of(feature)
        if names:
            found[str(name)] = names
    return found


def _names_of(feature: Any) -> list[str]:
    inner = _part(feature, "feature")
    plain = isinstance(inner, Mapping) and _kind(feature) not in ("Sequence", "List", "LargeList")
    if inner is not None and not plain:
        feature = inner
    if _kind(feature) != "ClassLabel":
        return []
    names = _part(feature, "names")
    good = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return list(names)[:MOST_CLASSES] if good else []


def _kind(feature: Any) -> str:
    said = _part(feature, "_type")
    return said if isinstance(said, str) else type(feature).__name__


def _part(feature: Any, name: str) -> Any:
    return feature.get(name) if isinstance(feature, Mapping) else getattr(feature, name, None)
