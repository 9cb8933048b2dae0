"""Where the samples of WebDataset tars lie: a scan of headers, kept as flat arrays.

About 24 bytes a member and 40 and its key a sample, so that tens of millions fit.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hpstore.errors import IngestError
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.loaders.ingestion.tar_headers import TarDamaged, TarHeaders, TarMember
from hpstore.loaders.ingestion.tar_runs import RUN_FILES, TarRun, tar_run
from hpstore.loaders.ingestion.tar_scan import NAME_BYTES, KnownEndings, all_differ, tar_samples

_MEMBER = re.compile(r"^((?:.*/)?[^./][^./]*)\.([^/]+)$")
APART = (
    "its files are not next to each other in the tar, as the files of one sample must be: write "
    "the tar again in the order of the names (tar --sort=name)"
)
MOST_ENDINGS = 1000


@dataclass(frozen=True, slots=True)
class SampleFile:
    """One file of a tar: its sample, its field, its bytes."""

    key: str
    extension: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberTable:
    """Files of samples: a row a sample, a column an ending."""

    endings: list[str]
    shards: npt.NDArray[np.int32]
    offsets: Int64s
    sizes: Int64s


def split_name(name: str) -> tuple[str, str] | None:
    """Key and extension of a member: "a/b.seg.png" is ("a/b", "seg.png"); None: no record."""
    found = _MEMBER.match(name)
    if found is None or found.group(1).startswith("__"):
        return None
    return found.group(1), found.group(2).lower()


def members(tar: TarHeaders) -> Iterator[tuple[SampleFile | None, TarMember]]:
    """Files of a tar in order, with None for what is no record."""
    for found in tar:
        if found.is_folder:
            continue
        names = split_name(found.name) if found.is_file else None
        if names is None:
            yield None, found
        else:
            yield SampleFile(*names, found.data_offset, found.nbytes), found


def too_many_endings(ending: str) -> IngestError:
    """The error of tars whose files have more endings than any dataset has fields."""
    return IngestError(
        f"the files have more than {MOST_ENDINGS} different endings, such as .{ending}: all behind "
        "the first dot of a name is its ending, so that a.001.jpg and a.002.jpg are one sample. "
        "Rename them without that dot"
    )


class TarIndex:
    """Samples of many plain tars by number. Grows while tars are scanned."""

    def __init__(self) -> None:
        self.extensions: list[str] = []
        self.broken: dict[int, str] = {}
        self.ignored = 0
        self._numbers: dict[str, int] = {}
        self._known = KnownEndings()
        self._own: set[int] = set()  # endings of the last sample
        self._last_key: bytes | None = None  # of the tar that is scanned
        self._keys_seen: set[bytes] | None = None  # None: not looked at while it is scanned
        self._first = array("q", [0])  # first member of each sample
        self._shards = array("i")
        self._extension = array("H")
        self._offsets, self._sizes = array("q"), array("q")
        self._keys, self._key_ends = bytearray(), array("q", [0])

    def __len__(self) -> int:
        return len(self._shards)

    def scan(self, shard: int, path: Path) -> None:
        """Add the samples of one tar. What is damaged becomes a broken sample, named."""
        first, ignored = len(self), self.ignored
        self._scan(shard, path, keys_seen=None)
        ends = np.array(self._key_ends[first:], np.int64)
        if len(ends) > 1 and ends[-1] == ends[-2]:
            ends = ends[:-1]  # the rest of a tar that is damaged has no key
        if not all_differ(bytes(self._keys[ends[0] :]), ends - ends[0]):
            self._forget(first, ignored)
            self._scan(shard, path, keys_seen=set())

    def _forget(self, samples: int, ignored: int) -> None:
        """All from this sample on."""
        self.ignored = ignored
        self.broken = {number: p for number, p in self.broken.items() if number < samples}
        members, keys = self._first[samples], self._key_ends[samples]
        del self._first[samples + 1 :], self._key_ends[samples + 1 :], self._keys[keys:]
        del self._shards[samples:], self._extension[members:]
        del self._offsets[members:], self._sizes[members:]

    def _scan(self, shard: int, path: Path, *, keys_seen: set[bytes] | None) -> None:
        """Add the samples of a tar. `keys_seen`: to find those that come twice at once."""
        self._last_key, self._keys_seen = None, keys_seen
        at = 0
        size = path.stat().st_size
        try:
            with path.open("rb") as file:
                tar = TarHeaders(file)
                while True:
                    if tar.is_plain:
                        run = tar_run(file, at)
                        self._run(shard, run, size)
                        at = run.end
                        if len(run) == RUN_FILES:
                            continue
                    found = next(tar.entries(at), None)
                    if found is None:
                        break
                    at = found.offset
                    if not found.is_folder:
                        name = found.name if found.is_file else ""
                        self._file(shard, name, found.data_offset, found.nbytes, size)
                    at = tar.next_at
                problem = tar.problem
        except (TarDamaged, OSError) as error:
            problem = f"it cannot be read past byte {at}: {error}"
        if problem:
            self._begin(shard, b"")
            self.broken[len(self) - 1] = problem

    def _run(self, shard: int, run: TarRun, tar_bytes: int) -> None:
        """Add ordinary files: many at once where nothing about them is unusual."""
        names, at = memoryview(run.names), 0
        cut = np.flatnonzero(run.offsets + run.sizes > tar_bytes)
        whole = int(cut[0]) if len(cut) else len(run)
        while at < len(run):
            taken = 0
            if self._keys_seen is None:
                taken, name_bytes = self._run_at_once(shard, run, names, at, whole - at)
                at, names = at + taken, names[name_bytes:]
            if at < len(run):
                name, names = _cut_name(names)
                offset, nbytes = int(run.offsets[at]), int(run.sizes[at])
                self._file(shard, name, offset, nbytes, tar_bytes)
                at += 1

    def _run_at_once(
        self, shard: int, run: TarRun, names: memoryview, at: int, count: int
    ) -> tuple[int, int]:
        """How many of `count` files from number `at` on were added, and bytes of their names."""
        found = (
            tar_samples(names, count, self._known, self._last_key, self._own) if count > 0 else None
        )
        if found is None or not len(found.endings):
            return 0, 0
        taken = len(found.endings)
        starts = np.flatnonzero(found.begins)
        members = self._first.pop()
        self._first.frombytes((members + starts).tobytes())
        self._first.append(members + taken)
        self._shards.frombytes(np.full(len(starts), shard, np.int32).tobytes())
        self._key_ends.frombytes((len(self._keys) + found.key_ends).tobytes())
        self._keys += found.keys
        self._extension.frombytes(found.endings.tobytes())
        self._offsets.frombytes(run.offsets[at : at + taken].tobytes())
        self._sizes.frombytes(run.sizes[at : at + taken].tobytes())
        if len(starts):
            self._own = set(found.endings[starts[-1] :].tolist())
            self._last_key = bytes(self._keys[self._key_ends[-2] :])
        else:
            self._own |= set(found.endings.tolist())
        return taken, found.name_bytes

    def _file(self, shard: int, name: str, offset: int, nbytes: int, tar_bytes: int) -> None:
        """Add a file; "" stands for what is none."""
        names = split_name(name)
        if names is None:
            self.ignored += 1
            return
        key, ending = names[0].encode(errors="surrogateescape"), names[1]
        if key != self._last_key:
            self._begin(shard, key)
            self._last_key = key
            if self._keys_seen is not None:
                if key in self._keys_seen:
                    self.broken[len(self) - 1] = APART
                self._keys_seen.add(key)
        self._add(ending, offset, nbytes, tar_bytes)

    def _begin(self, shard: int, key: bytes) -> None:
        self._shards.append(shard)
        self._first.append(self._first[-1])
        self._own = set()
        self._keys += key
        self._key_ends.append(len(self._keys))

    def _add(self, ending: str, offset: int, nbytes: int, tar_bytes: int) -> None:
        number = self._number(ending)
        if number in self._own:
            self.broken[len(self) - 1] = f"it has two members .{ending}"
        self._own.add(number)
        if offset + nbytes > tar_bytes:
            self.broken[len(self) - 1] = f".{ending} is cut short by the end of the tar"
        self._extension.append(number)
        self._offsets.append(offset)
        self._sizes.append(nbytes)
        self._first[-1] += 1

    def _number(self, ending: str) -> int:
        """Of an ending, a new one where it has none. Raises IngestError."""
        number = self._numbers.get(ending, -1)
        if number < 0:
            number = len(self.extensions)
            if number == MOST_ENDINGS:
                raise too_many_endings(ending)
            self._numbers[ending] = number
            self._known.add(ending, number)
            self.extensions.append(ending)
        return number

    def shard(self, sample: int) -> int:
        """The tar of a sample."""
        return self._shards[sample]

    def key(self, sample: int) -> str:
        """The key of a sample; "" stands for a tar's unreadable rest."""
        raw = self._keys[self._key_ends[sample] : self._key_ends[sample + 1]]
        return raw.decode(errors="surrogateescape")

    def members(self, sample: int) -> list[SampleFile]:
        """Where the files of a sample are."""
        return [
            SampleFile("", self.extensions[self._extension[i]], self._offsets[i], self._sizes[i])
            for i in range(self._first[sample], self._first[sample + 1])
        ]

    def sample_bytes(self) -> Int64s:
        """Bytes of each sample's files."""
        ends = np.concatenate([[0], np.cumsum(np.array(self._sizes, np.int64))])
        return np.diff(ends[np.array(self._first, np.int64)])

    def table(self, samples: Int64s) -> MemberTable | None:
        """Where the files of these samples lie, which have the same endings; None for others."""
        firsts = np.frombuffer(self._first, np.int64)
        first = firsts[samples]
        counts = firsts[samples + 1] - first
        if not counts[0] or (counts != counts[0]).any():
            return None
        places = first[:, None] + np.arange(counts[0])
        endings = np.frombuffer(self._extension, np.uint16)[places]
        if (endings != endings[0]).any():
            return None
        return MemberTable(
            endings=[self.extensions[number] for number in endings[0].tolist()],
            shards=np.frombuffer(self._shards, np.int32)[samples],
            offsets=np.frombuffer(self._offsets, np.int64)[places],
            sizes=np.frombuffer(self._sizes, np.int64)[places],
        )


def _cut_name(names: memoryview) -> tuple[str, memoryview]:
    """The first name, and those behind its zero."""
    raw = bytes(names[:NAME_BYTES]).partition(b"\0")[0]
    return raw.decode(errors="surrogateescape"), names[len(raw) + 1 :]
