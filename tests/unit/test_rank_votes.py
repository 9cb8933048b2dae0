"""Votes of ranks: what was written travels whole, and all of it together is one list."""

from __future__ import annotations

import numpy as np
import pytest

from hpstore.checkpoint.format.items import Item, ItemColumns, whole
from hpstore.checkpoint.format.pack import Segment
from hpstore.checkpoint.save.rank_vote import RankVote, merged
from hpstore.errors import CheckpointError


def vote(name: str, *, within: bytes | None, key: str = "", offset: int = 0) -> RankVote:
    """Of a rank that wrote one item, into the manifest or into a segment."""
    size = len(within or b"") or 4
    data = None if within is None else np.frombuffer(within, np.uint8)
    columns = ItemColumns()
    item = Item(
        name=name,
        dtype="uint8",
        shape=(size,),
        box=whole((size,)),
        offset=offset,
        length=size - offset,
    )
    columns.add([item], segment=0)
    return RankVote(
        segments=[Segment(key=key, size=size if key or within else 0, version="", data=data)],
        columns=columns,
        tree={"n\n": name},
    )


@pytest.mark.parametrize("within", [b"\n\x00ab", b"", b"\n"])
def test_a_vote_and_its_bytes_come_as_they_were(within: bytes) -> None:
    """Line ends in names and bytes, and no bytes at all."""
    sent = vote("a\n", within=within)
    heard = RankVote.decode(sent.encode())
    assert heard.segments == sent.segments
    assert heard.tree == sent.tree
    assert heard.within is not None
    assert heard.within.tobytes() == within
    own = RankVote.decode(sent.encode(with_bytes=False), within=sent.within)
    assert own.within is sent.within


def test_bytes_that_have_not_come_are_an_error() -> None:
    """A manifest without them would be a save with a lost tensor."""
    sent = vote("a", within=b"abcd")
    for message in (sent.encode(with_bytes=False), sent.encode()[:-1], sent.encode() + b"e"):
        with pytest.raises(CheckpointError, match="of 4 bytes of a rank have come"):
            RankVote.decode(message)


def test_bytes_of_several_ranks_lie_one_after_the_other() -> None:
    """In one segment, whoever has none, beside segments that are objects."""
    votes = [
        RankVote(),
        vote("a", within=b"x" * 70, offset=1),
        vote("b", within=None, key="run/segment"),
        vote("c", within=b"yz"),
    ]
    found = merged(votes)
    together, apart = found.segments
    assert (together.key, together.size, apart.key) == ("", 130, "run/segment")
    assert together.data is not None
    for item in found.columns.items():
        if item.segment == 0:
            text = together.data[item.offset : item.offset + item.length].tobytes()
            assert text == {"a": b"x" * 69, "c": b"yz"}[item.name]
    assert [i.segment for i in found.columns.items()] == [0, 1, 0]


def test_bytes_of_one_rank_are_not_copied() -> None:
    """Mostly rank 0 has all."""
    only = vote("a", within=b"abcd")
    assert merged([only, RankVote()]).within is only.within
