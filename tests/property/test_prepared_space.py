"""What is written ahead on one device: enough for what is wanted, within the limits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpstore.devices.base import Usage
from hpstore.devices.reserve import reserve_bytes
from hpstore.objects.write.prewrite_files import Kept, plan_files

sizes = st.lists(st.integers(1, 100), max_size=8)


def serves(kept: list[int], wanted: list[int]) -> bool:
    """Whether every wanted size finds a file of its own that is as large: largest first."""
    have, need = sorted(kept, reverse=True), sorted(wanted, reverse=True)
    return len(have) >= len(need) and all(h >= n for h, n in zip(have, need, strict=False))


@given(wanted=sizes, kept=sizes, free=st.integers(0, 3000), limit=st.integers(0, 1000))
def test_planned_files_serve_what_is_wanted_within_the_limits(
    wanted: list[int], kept: list[int], free: int, limit: int
) -> None:
    """All are served where nothing limits; never more than is missing, the limit, the space."""
    usage = Usage(total=5000, free=free + sum(kept), kept=sum(kept))
    planned = plan_files(wanted, Kept(sizes=tuple(kept), usage=usage), limit)
    assert not planned or sum(planned) + sum(kept) <= limit
    assert not planned or free - sum(planned) >= reserve_bytes(usage)
    boundless = Usage(total=5000, free=10**6 + sum(kept), kept=sum(kept))
    whole = plan_files(wanted, Kept(sizes=tuple(kept), usage=boundless), 10**6)
    assert serves(kept + whole, wanted)
    assert planned == whole[: len(planned)]
    for size in set(whole):  # none too many
        fewer = list(whole)
        fewer.remove(size)
        assert not serves(kept + fewer, wanted)
