"""Names of classes that Arrow and Parquet files hold: of Hugging Face's features, of dictionaries.
Any: pyarrow is untyped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hpstore.errors import ConfigError
from hpstore.loaders.dataset.class_names import MOST_CLASSES, feature_classes
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.ingestion.arrow_nested import Convert, NullInside


def recorded_classes(schema: Any) -> dict[str, list[str]]:
    """What Hugging Face has recorded in a schema. Of what is malformed, nothing."""
    raw = (schema.metadata or {}).get(b"huggingface")
    try:
        features = json.loads(raw)["info"]["features"] if raw else {}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return feature_classes(features) if isinstance(features, Mapping) else {}


def is_categorical(arrow: Any, kind: Any) -> bool:
    """Whether a column is a dictionary of texts."""
    t = arrow.types
    return bool(
        t.is_dictionary(kind)
        and (t.is_string(kind.value_type) or t.is_large_string(kind.value_type))
    )


def dictionary_classes(columns: Iterable[Any]) -> list[str]:
    """The texts of a column's dictionaries, in the order in which they come first; none where
    there are more than classes would be."""
    found: dict[str, None] = {}
    for column in columns:
        found |= dict.fromkeys(t for t in column.dictionary.to_pylist() if t is not None)
        if len(found) > MOST_CLASSES:
            return []
    return list(found)


def class_numbers(arrow: Any, names: Sequence[str], field: Field) -> Convert:
    """What makes numbers of a dictionary's texts. Raises ConfigError when they do not fit."""
    import pyarrow.compute

    if field.shape or field.storage.kind not in "iu" or field.dtype == "bfloat16":
        raise ConfigError(f"classes of a dictionary are texts or whole numbers, not {field.dtype}")
    if len(names) > np.iinfo(field.storage).max + 1:
        raise ConfigError(f"{len(names)} classes of a dictionary do not fit {field.dtype}")
    known = arrow.array(list(names), arrow.string())

    def numbers(column: Any) -> Sequence[object]:
        texts = column.dictionary_decode().cast(arrow.string())
        if texts.null_count:
            raise NullInside
        found = pyarrow.compute.index_in(texts, value_set=known)
        if found.null_count:
            text = texts.filter(found.is_null())[0].as_py()
            raise ValueError(
                f"{text[:40]!r} is none of the {len(names)} classes of the dictionary, which takes "
                f"at most {MOST_CLASSES}: take it as text"
            )
        made: Sequence[object] = found.to_numpy(zero_copy_only=False).astype(field.storage)
        return made

    return numbers
