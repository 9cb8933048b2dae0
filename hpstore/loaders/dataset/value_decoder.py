"""From what is stored of a batch to its values: None, JSON, and images where that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hpstore.codec.galois import Bytes
from hpstore.errors import ConfigError, IntegrityError
from hpstore.loaders.dataset.batch_values import Batch, BatchValue, Ragged, chosen_rows, mask_of
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.dataset.image_decode import ImageDecode, decode_image


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """A batch without the rows that could not be decoded, and what was wrong with these, by row."""

    batch: Batch
    failed: Mapping[int, IntegrityError]


# Any below: what JSON and images become
@dataclass(frozen=True, slots=True)
class ValueDecoder:
    """Makes values of what is stored. Thread-safe; it pickles.

    `images`: how fields of encoded images are decoded; others stay bytes.
    """

    fields: Mapping[str, Field]
    images: Mapping[str, ImageDecode]

    @property
    def needed(self) -> bool:
        """Whether batches are anything else than what is stored."""
        return bool(self.images) or not all(made.is_plain for made in self.fields.values())

    def value(self, name: str, raw: Bytes) -> Any:
        """One value of its stored bytes. Raises IntegrityError."""
        made = self.fields[name]
        try:
            if name in self.images:
                return decode_image(raw.data, self.images[name])
            return made.as_value(raw)
        except ValueError as error:
            if name in self.images and isinstance(error, ConfigError):
                raise  # a package is not installed
            what = "image that can be decoded" if name in self.images else f"{made.dtype} value"
            raise IntegrityError(f"field {name!r} holds no {what}: {error}") from error

    def batch(self, stored: Batch, count: int) -> DecodedBatch:
        """The values of `count` rows. Rows that cannot be decoded are left out of all fields."""
        found, failed = dict(stored), dict[int, IntegrityError]()
        for name, made in self.fields.items():
            there = mask_of(stored, name) if made.optional else [True] * count
            value = stored[name]
            if made.is_json or name in self.images:
                assert isinstance(value, Ragged)
                found[name] = self._decoded(name, value, there, failed)
            elif made.optional and isinstance(value, list):
                found[name] = [
                    text if has else None for text, has in zip(value, there, strict=True)
                ]
        if failed:
            rows = [row for row in range(count) if row not in failed]
            found = {name: chosen_rows(value, rows) for name, value in found.items()}
        for name in self.images:
            values = found[name]
            assert isinstance(values, list)
            found[name] = stacked(values)
        return DecodedBatch(found, failed)

    def _decoded(
        self, name: str, raw: Ragged, there: Sequence[bool], failed: dict[int, IntegrityError]
    ) -> list[Any]:
        """Values by row; None where there is none, or where it fails."""
        values: list[Any] = []
        for row, (one, has) in enumerate(zip(raw, there, strict=True)):
            made = None
            if has:
                try:
                    made = self.value(name, one.numpy())
                except IntegrityError as error:
                    failed.setdefault(row, error)
            values.append(made)
        return values

    def collate(self, samples: Sequence[Any], default: Callable[[Any], Any]) -> Any:
        """Samples as a batch: by `default`, but for values that it cannot put together.

        Of optional fields comes the mask, too; JSON and texts are lists; images and other tensors
        of different sizes stay a list.
        """
        first = samples[0]
        if not isinstance(first, dict):
            return default(samples)
        made: dict[str, Any] = {}
        for name in first:
            values = [sample[name] for sample in samples]
            field = self.fields.get(name)
            if field is None or (field.is_plain and name not in self.images):
                made[name] = default(values)
                continue
            there = [value is not None for value in values]
            if field.optional and not field.is_json:
                values = _without_none(field, values, ragged=name not in self.images)
            made[name] = values if field.is_json else _together(values, default)
            if field.optional:
                made[f"{name}_mask"] = torch.tensor(there)
        return made


def stacked(values: list[Any]) -> BatchValue:
    """Tensors of one size as one; None becomes zeros. Else the list as it is."""
    shapes = {value.shape for value in values if value is not None}
    if len(shapes) != 1:
        return values
    some = next(value for value in values if value is not None)
    return torch.stack([torch.zeros_like(some) if one is None else one for one in values])


def _together(values: list[Any], default: Callable[[Any], Any]) -> Any:
    """Numbers and tensors of one size by `default`, others as they are."""
    if all(isinstance(value, bool | int | float | complex) for value in values):
        return default(values)
    if not all(isinstance(value, torch.Tensor) for value in values):
        return values
    return default(values) if len({value.shape for value in values}) == 1 else values


def _without_none(field: Field, values: list[Any], *, ragged: bool) -> list[Any]:
    """Zeros for None, where the others are tensors or numbers of one size; nothing where the sizes
    may differ, which those of images do, too (`ragged` is False for these)."""
    some = next((value for value in values if value is not None), None)
    if some is None and not field.is_ragged:
        some = field.as_rows(torch.zeros(1, field.row_bytes, dtype=torch.uint8))[0]
    if ragged and field.is_ragged and isinstance(some, torch.Tensor):
        nothing = some.new_empty((0, *some.shape[1:]))
        return [nothing if value is None else value for value in values]
    if isinstance(some, torch.Tensor):
        return [torch.zeros_like(some) if value is None else value for value in values]
    if isinstance(some, bool | int | float | complex):
        return [type(some)(0) if value is None else value for value in values]
    return values
