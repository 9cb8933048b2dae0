"""How well windows mix labels: measured on a few of them, before a run trains on sorted batches."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hpstore.errors import HpstoreError
from hpstore.loaders.dataset.fields import FieldKind, mask_name
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.loaders.dataset.record_reader import StoredData
from hpstore.loaders.sampling.random_draws import Indices
from hpstore.units import MIB, div_ceil, format_bytes

_log = logging.getLogger(__name__)
MOST_STRIPES, ROWS_OF_STRIPE = 256, 64  # looked at: 16,384 labels, whatever the size
DRAWS = 16  # windows, and random choices, of which a mean is taken
POOR, GOOD = 0.8, 0.95  # of the entropy that a random choice of as many samples has
MOST_FIELDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixedness:
    """Entropy of a field's values, in bits. `enough_stripes`: of a window that mixes them well; 0
    when only all of them do.
    """

    field: str
    window_bits: float
    random_bits: float
    enough_stripes: int
    enough_bits: float

    @property
    def poor(self) -> bool:
        """Whether batches of such a window are far from random ones."""
        return self.window_bits < POOR * self.random_bits


def measure(field: str, labels: list[Int64s], *, window_stripes: int, stripes: int) -> Mixedness:
    """Of windows of `window_stripes`, from the labels of some of all `stripes`. Pure.

    Compared with a random choice of as many labels, as few samples of many classes have little
    entropy however they are chosen.
    """
    rng = np.random.default_rng(0)
    _, codes = np.unique(np.concatenate(labels), return_inverse=True)
    ends = np.cumsum([len(one) for one in labels])
    parts = np.split(codes, ends[:-1])

    def both(count: int) -> tuple[float, float]:
        found = []
        for _ in range(DRAWS):
            chosen = rng.permutation(len(parts))[:count]
            window = np.concatenate([parts[number] for number in chosen])
            found.append((entropy(window), entropy(rng.permutation(codes)[: len(window)])))
        window_bits, random_bits = np.mean(found, axis=0)
        return float(window_bits), float(random_bits)

    window_bits, random_bits = both(window_stripes)
    enough, bits = window_stripes, (window_bits, random_bits)
    while bits[0] < GOOD * bits[1] and enough < min(stripes, len(parts)):
        enough *= 2
        bits = both(enough)
    return Mixedness(
        field=field,
        window_bits=window_bits,
        random_bits=random_bits,
        enough_stripes=enough if enough < stripes and enough <= len(parts) else 0,
        enough_bits=bits[0],
    )


def entropy(codes: Int64s) -> float:
    """Shannon's, in bits, of whole numbers from 0."""
    shares = np.bincount(codes) / max(1, len(codes))
    shares = shares[shares > 0]
    return float(-(shares * np.log2(shares)).sum())


def warn_of_sorted(
    data: StoredData,
    stripes: Int64s,
    *,
    window_stripes: int,
    stripe_bytes: int,
    rows_of: Callable[[Int64s], Indices],
) -> None:
    """Log a warning when windows mix a label-like field badly. `rows_of`: samples at positions.

    Reads at most MOST_STRIPES * ROWS_OF_STRIPE values a field; what cannot be read is no reason
    not to train.
    """
    filled = np.flatnonzero(np.diff(stripes))
    if window_stripes >= len(filled):
        return
    looked = filled[np.linspace(0, len(filled) - 1, min(len(filled), MOST_STRIPES)).astype(int)]
    places = [
        np.linspace(stripes[n], stripes[n + 1] - 1, min(ROWS_OF_STRIPE, count)).astype(np.int64)
        for n, count in zip(looked.tolist(), np.diff(stripes)[looked].tolist(), strict=True)
    ]
    rows = np.asarray(rows_of(np.concatenate(places)), np.int64)
    cuts = np.cumsum([len(one) for one in places])[:-1]
    for name in _label_fields(data):
        try:
            values = _classes(data, name, rows)
        except HpstoreError as error:
            _log.info("whether windows mix %r well was not measured: %s", name, error)
            return
        if not 2 <= len(np.unique(values)) <= len(values) // 4:
            continue  # numbers of samples, or all the same
        found = measure(
            name, np.split(values, cuts), window_stripes=window_stripes, stripes=len(filled)
        )
        if found.poor:
            _say(data, found, window_stripes, stripe_bytes)
            return


def _classes(data: StoredData, name: str, rows: Indices) -> Indices:
    """Classes of samples: their values, or ranks of these with 0 for a sample that has none."""
    values: Indices = data.scalars(name, rows)
    if not data.fields[name].optional:
        return values
    ranks = np.unique(values, return_inverse=True)[1] + 1
    return np.where(data.scalars(mask_name(name), rows), ranks, 0)


def _label_fields(data: StoredData) -> list[str]:
    """Fields that may be labels: single whole numbers."""
    return [
        name
        for name, field in data.fields.items()
        if field.kind is FieldKind.SCALAR
        and not field.shape
        and field.storage.kind in "iub"
        and field.dtype != "bfloat16"
    ][:MOST_FIELDS]


def _say(data: StoredData, found: Mixedness, window_stripes: int, stripe_bytes: int) -> None:
    instead = "No smaller window than all of it would do"
    if found.enough_stripes:
        size = div_ceil(found.enough_stripes * stripe_bytes, MIB)
        instead = f'LoaderMemory(window_bytes="{size}MiB") would have {found.enough_bits:.1f}'
    _log.warning(
        "data set %s is sorted by %r, or nearly: windows of %s have %.1f bits of it, of %.1f in "
        "as many samples chosen at random, and batches are as unbalanced. %s; better, shuffle it "
        "once on writing (ingest does, DatasetWriter with shuffle=True), or give shuffle=True.",
        repr(data.name),
        found.field,
        format_bytes(window_stripes * stripe_bytes),
        found.window_bits,
        found.random_bits,
        instead,
    )
