"""What arrays of a dataset that is seen through zarr say beside what zarr knows. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hpstore.loaders.dataset.fields import BFLOAT16

DTYPE = "hpstore_dtype"  # the field's: bfloat16 is uint16 in zarr
MASK = "hpstore_mask"  # name of the array of bools, True where the optional field has a value


def is_bfloat16(array: Any) -> bool:
    """Whether the numbers of a zarr array are bits of bfloat16. Any: zarr is not imported here."""
    return array.attrs.get(DTYPE) == BFLOAT16 and bool(array.dtype == np.uint16)


def masks_of(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Names of the masks that are among some zarr arrays, by the array that each is of."""
    named = {name: array.attrs.get(MASK) for name, array in arrays.items()}
    found = {name: mask for name, mask in named.items() if isinstance(mask, str) and mask in arrays}
    return {
        name: mask
        for name, mask in found.items()
        if arrays[mask].ndim == 1 and arrays[mask].dtype == np.bool_
    }
