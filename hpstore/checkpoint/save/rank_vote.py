"""The vote of a rank: what it has written. All votes together are one manifest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpstore.checkpoint.format.items import ItemColumns
from hpstore.checkpoint.format.pack import Segment
from hpstore.checkpoint.format.segment_plan import SMALL_ALIGNMENT
from hpstore.codec.galois import Bytes
from hpstore.errors import CheckpointError
from hpstore.units import round_up


@dataclass(slots=True, kw_only=True)
class RankVote:
    """What one rank has written and refers to; columns' segments count into `segments`.

    A segment without a key has its bytes with it: they go into the manifest.
    """

    segments: list[Segment] = field(default_factory=list)
    columns: ItemColumns = field(default_factory=ItemColumns)
    tree: Any = None  # Any: JSON made by hpstore/checkpoint/state/state_tree.py
    referenced_bytes: int = 0
    tolerated: int = 0  # columns that any of `segments` may lose
    error: str = ""

    @property
    def within(self) -> Bytes | None:
        """The bytes that go into the manifest."""
        return next((s.data for s in self.segments if s.data is not None), None)

    def encode(self, *, with_bytes: bool = True) -> bytes:
        """For another rank: a line of JSON, then the bytes."""
        body = {
            "segments": [[s.key, s.size, s.version] for s in self.segments],
            "items": self.columns.json(),
            "tree": self.tree,
            "referenced_bytes": self.referenced_bytes,
            "tolerated": self.tolerated,
            "error": self.error,
        }
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        within = self.within if with_bytes else None
        return text if within is None else b"".join((text, b"\n", within.data))

    @classmethod
    def decode(cls, message: bytes, *, within: Bytes | None = None) -> RankVote:
        """Inverse of encode; `within`: the bytes, where they did not travel.

        Raises CheckpointError when other bytes have come than were written.
        """
        end = message.find(b"\n")  # there is none in JSON without spaces
        body = json.loads(message if end < 0 else message[:end])
        if within is None and end >= 0:
            within = np.frombuffer(message, np.uint8, offset=end + 1)
        made = cls(
            segments=[
                Segment(key=k, size=s, version=v, data=None if k else within)
                for k, s, v in body["segments"]
            ],
            columns=ItemColumns.of_json(body["items"]),
            tree=body["tree"],
            referenced_bytes=body["referenced_bytes"],
            tolerated=body["tolerated"],
            error=body["error"],
        )
        made._require_bytes()
        return made

    def _require_bytes(self) -> None:
        for segment in self.segments:
            there = 0 if segment.data is None else len(segment.data)
            if not segment.key and there != segment.size:
                raise CheckpointError(f"{there} of {segment.size} bytes of a rank have come")

    def index_of(self, segment: Segment) -> int:
        """Where a segment stands in the list, put there when it is not."""
        if segment not in self.segments:
            self.segments.append(segment)
        return self.segments.index(segment)


def merged(votes: Sequence[RankVote]) -> RankVote:
    """Segments and items of all ranks; what goes into the manifest is one segment."""
    found, at = RankVote(), 0
    begins: list[int] = []  # by rank: where its bytes begin in that segment
    for vote in votes:
        begins.append(round_up(at, SMALL_ALIGNMENT))
        at = begins[-1] + len(vote.within) if vote.within is not None else at
    whole = Segment(key="", size=at, version="", data=_joined(votes, begins, at))
    for vote, begin in zip(votes, begins, strict=True):
        places = [found.index_of(s if s.key else whole) for s in vote.segments]
        shifts = [0 if s.key else begin for s in vote.segments]
        found.columns.extend(vote.columns, places, shifts)
    return found


def _joined(votes: Sequence[RankVote], begins: Sequence[int], size: int) -> Bytes:
    """One rank's bytes as they are, several ranks' copied, each to its place."""
    parts = [(b, v.within) for b, v in zip(begins, votes, strict=True) if v.within is not None]
    if len(parts) == 1 and parts[0][0] == 0:
        return parts[0][1]
    joined = np.zeros(size, np.uint8)
    for begin, part in parts:
        joined[begin : begin + len(part)] = part
    return joined
