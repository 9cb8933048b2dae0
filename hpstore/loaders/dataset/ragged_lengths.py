"""How long the values of a ragged field are, from the tables beside the records."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hpstore.errors import ConfigError, IntegrityError
from hpstore.loaders.dataset.fields import FieldKind
from hpstore.loaders.dataset.record_reader import StoredData

Lengths = npt.NDArray[np.uint32]


def ragged_lengths(data: StoredData, field: str) -> Lengths:
    """Elements of each sample's value of a ragged field, (n,); of text and bytes its bytes.

    Reads the side objects of its stream, 20 bytes a sample, checked against the manifest, and no
    record. Raises ConfigError, IntegrityError, ObjectNotFound.
    """
    if field not in data.fields or data.fields[field].kind is not FieldKind.RAGGED:
        ragged = [name for name, made in data.fields.items() if made.kind is FieldKind.RAGGED]
        raise ConfigError(
            f"data set {data.name!r} was opened without a ragged field {field!r}; ragged are "
            f"{ragged}"
        )
    stream = next(one for one in data.streams if field in one.record.ragged)
    table = 2 + stream.record.ragged.index(field)  # behind checksums and starts
    parts = [
        np.asarray(data.side_tables(stream, shard)[table], np.uint32)
        for shard in range(stream.shard_count)
    ]
    nbytes = np.concatenate([np.empty(0, np.uint32), *parts])
    element = data.fields[field].row_bytes
    if element == 1:
        return nbytes
    counts = nbytes // np.uint32(element)
    if (counts * np.uint32(element) != nbytes).any():
        raise IntegrityError(
            f"data set {data.name!r}: lengths of {field!r} are no multiples of {element} bytes. "
            "Nothing was changed; write the data set again"
        )
    return counts
