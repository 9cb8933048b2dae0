"""The counters that forecasts look at: their names, words for people, how raw values are read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

UNNAMED_FAMILY = "unnamed"  # of drives in files without a model column
SPEC_FLAG = "spec_flag"
_PACKED = frozenset({"smart_188"})  # Seagate packs three 16-bit words; the lowest is the count
_WORD = 1 << 16
_MAX_RAW = float(1 << 64)
# attributes with a threshold above 0 in every vendor's firmware that we know of
_PREFAIL = ("smart_1", "smart_3", "smart_5", "smart_7", "smart_10")
# the lowest value that ATA allows: at or below every threshold above 0
_LOWEST_NORMALISED = 1.0
_WEAR_BIT, _CRITICAL_BITS = 0x04, 0x1F
_VENDORS = re.compile(
    r"^(?:ATA|DELL|HGST|HITACHI|HP|INTEL|MICRON|SAMSUNG|SEAGATE|TOSHIBA|WDC)[ _]+", re.IGNORECASE
)
_SEAGATE_SUFFIX = re.compile(r"^(ST\d+[A-Z]{2}\w+)-\w+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """One column. `only_rises`: a fall is a reset, not a recovery."""

    name: str
    words: str
    column: str  # of drive-stats files
    only_rises: bool = True


def _smart(number: int, words: str, *, only_rises: bool = True) -> Counter:
    return Counter(
        name=f"smart_{number}", words=words, column=f"smart_{number}_raw", only_rises=only_rises
    )


# 1 and 7 are left out: composites of vendors' own making. So is num_err_log_entries of NVMe:
# asking for it makes it rise.
COUNTERS: tuple[Counter, ...] = (
    _smart(5, "reallocated sectors"),
    _smart(9, "power-on hours"),
    _smart(10, "spin-up retries"),
    _smart(184, "end-to-end errors"),
    _smart(187, "uncorrectable errors"),
    _smart(188, "command time-outs"),
    _smart(193, "load cycles"),
    _smart(194, "temperature", only_rises=False),
    _smart(197, "pending sectors", only_rises=False),
    _smart(198, "sectors that offline tests could not read", only_rises=False),
    _smart(199, "transfer errors on the cable"),
    _smart(241, "blocks written"),
    _smart(242, "blocks read"),
    Counter(name="nvme_media_errors", words="media errors", column="nvme_media_errors"),
    Counter(
        name="nvme_available_spare",
        words="spare blocks in per cent",
        column="nvme_available_spare",
        only_rises=False,
    ),
    Counter(
        name="nvme_percentage_used",
        words="wear in per cent",
        column="nvme_percentage_used",
        only_rises=False,
    ),
    Counter(name=SPEC_FLAG, words="spec flag", column=SPEC_FLAG, only_rises=False),
)
INDEX: Mapping[str, int] = {counter.name: i for i, counter in enumerate(COUNTERS)}
# The counters whose sum is the plain yardstick, and the rule score's
SUM_COUNTERS = ("smart_5", "smart_187", "smart_197", "smart_198")
RULE_COUNTERS = (*SUM_COUNTERS, "nvme_media_errors")
# Columns beside the counters' own from which a spec flag is told
FLAG_COLUMNS = (*(f"{name}_normalized" for name in _PREFAIL), "nvme_critical_warning")


def decode(name: str, raw: float) -> float:
    """The count in a raw value. Raises ValueError for what no counter can hold. Pure."""
    if not 0.0 <= raw < _MAX_RAW:
        raise ValueError(f"{name} is {raw}")
    return raw % _WORD if name in _PACKED and raw >= _WORD else raw


def flagged(column: str, value: float) -> bool:
    """Whether this column alone says that the drive fails by its own specification. Pure.

    Wear of an NVMe drive (bit 0x04) is no flag: it asks for a replacement plan.
    """
    if column == "nvme_critical_warning":
        return bool(int(value) & _CRITICAL_BITS & ~_WEAR_BIT)
    return value <= _LOWEST_NORMALISED


def family_of(model: str) -> str:
    """The family of a model name, the same from drive-stats files and from the drive. Pure.

    "Seagate ST4000DM000-1F2168" and "ST4000DM000" are both ST4000DM000.
    """
    name = _VENDORS.sub("", " ".join(model.split())).upper()
    match = _SEAGATE_SUFFIX.match(name)
    return (match.group(1) if match else name) or UNNAMED_FAMILY
