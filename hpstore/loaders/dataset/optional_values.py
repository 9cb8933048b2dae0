"""Optional fields: what stands in the place of None, and the mask beside it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from hpstore.errors import ConfigError
from hpstore.loaders.dataset.fields import BLANK, Array, Field, FieldKind, mask_name


def blank(field: Field) -> object:
    """What is stored for None: zeros, or no bytes."""
    if field.kind is FieldKind.RAGGED:
        return BLANK
    return np.zeros(field.inner_shape, field.storage)


def take_masks(
    batch: Mapping[str, object], fields: Mapping[str, Field], where: str
) -> tuple[Mapping[str, object], dict[str, Array]]:
    """A batch without the masks of optional fields, and these by field. Raises ConfigError."""
    owners = {mask_name(n): n for n, f in fields.items() if f.optional}
    if not owners or not isinstance(batch, Mapping) or not owners.keys() & batch.keys():
        return batch, {}
    masks = {}
    for mask, name in owners.items():
        if mask in batch:
            found = batch[mask]
            made = found.numpy() if isinstance(found, torch.Tensor) else np.asarray(found)
            if made.dtype != np.bool_ or made.ndim != 1:
                raise ConfigError(f"{where}: {mask!r} is the mask of {name!r}: bools, one a row")
            masks[name] = made
    return {name: value for name, value in batch.items() if name not in owners}, masks


def filled(field: Field, values: object, mask: Array | None) -> tuple[object, Array]:
    """Values of a batch with blanks for None, and their mask. `mask`: given beside them, where it
    was; what it leaves out is not looked at.

    What is no list of values is left as it is, for the check that follows.
    """
    if not isinstance(values, list | tuple):
        if mask is None or not isinstance(values, np.ndarray | torch.Tensor) or not values.ndim:
            return values, np.ones(len(values) if hasattr(values, "__len__") else 0, np.bool_)
        values = list(values)
    there = np.array([value is not None for value in values], np.bool_)
    if mask is not None:
        there = there & mask if len(mask) == len(there) else mask
    nothing = blank(field)
    rows = [one if has else nothing for one, has in zip(values, there.tolist(), strict=False)]
    return rows + list(values[len(rows) :]), there
