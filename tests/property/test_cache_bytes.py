"""Whatever happens to a cache, its readers get the bytes of the source, or its error."""

from __future__ import annotations

import contextlib
import os
import tempfile

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpstore.loaders.cache import AnyAttached, Cache
from tests.integration.cache_sources import NumberedSource, read_checked

COUNT = 60
SIZES = st.one_of(
    st.integers(0, 3000),
    st.integers(0, 1 << 30).map(
        lambda seed: np.random.default_rng(seed).integers(0, 6000, COUNT).astype(np.int64)
    ),
)
STEP = st.one_of(
    st.tuples(st.just("read"), st.lists(st.integers(0, COUNT - 1), max_size=12)),
    st.tuples(st.just("foretell"), st.integers(0, 3)),
    st.tuples(st.just("follow"), st.integers(1, 4)),
    st.tuples(st.just("fail"), st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=6)),
    st.tuples(st.just("damage"), st.integers(0, 1 << 16)),
    st.tuples(st.just("other"), st.lists(st.integers(0, COUNT - 1), max_size=12)),
    st.tuples(st.just("restart"), st.just(0)),
    st.tuples(st.just("change"), st.just(0)),
)


class Scene:
    """A cache over a source, with a disk tier, and another source beside it now and then."""

    def __init__(self, sizes: int | np.ndarray, folder: str) -> None:
        self.folder = folder
        self.source = NumberedSource(COUNT, sizes)
        self.side = NumberedSource(COUNT, 500, name="val/0")
        self.rng = np.random.default_rng(0)
        self.start()

    def start(self) -> None:
        """Open the cache as a new process would."""
        self.cache = Cache(400_000, disk_path=self.folder, disk_bytes=60 * 4096)
        self.reader = self.cache.attach(self.source, batch_blocks=12)
        self.other: AnyAttached | None = None
        self.order = np.empty(0, np.int64)
        self.epoch = 0

    def step(self, what: str, value: object) -> None:
        """One thing that may happen."""
        if what == "read":
            read_checked(self.reader, self.source, np.array(value, np.int64))
        elif what == "foretell":
            told = self.rng.permutation(COUNT)
            self.reader.begin_epoch(COUNT)
            self.reader.expect(self.epoch, told)
            self.epoch += 1 + int(value == 3)
            self.order = np.concatenate([self.order, told]) if value else told
        elif what == "follow":
            for _ in range(int(str(value))):
                read_checked(self.reader, self.source, self.order[:7])
                self.order = self.order[7:]
        elif what == "fail":
            self.fail(np.array(value, np.int64))
        elif what == "damage":
            self.damage(int(str(value)))
        elif what == "other":
            self.other = self.other or self.cache.attach(self.side)
            read_checked(self.other, self.side, np.array(value, np.int64))
        else:
            self.cache.close()
            if what == "change":
                self.source = NumberedSource(
                    COUNT, self.source.sizes, version=self.source.version + 1
                )
            self.start()

    def fail(self, blocks: np.ndarray) -> None:
        """A read beside a failing source: its error, or the right bytes."""
        self.source.failing = True
        with contextlib.suppress(OSError):
            read_checked(self.reader, self.source, blocks)
        self.source.failing = False
        read_checked(self.reader, self.source, blocks)

    def damage(self, seed: int) -> None:
        """Change a byte of a file of the disk tier."""
        self.cache.flush()
        names = sorted(n for n in os.listdir(self.folder) if n.endswith((".blocks", ".table")))
        rng = np.random.default_rng(seed)
        path = os.path.join(self.folder, names[seed % len(names)])
        with open(path, "r+b") as file:
            file.seek(int(rng.integers(0, os.path.getsize(path))))
            file.write(bytes([int(rng.integers(0, 256))]))


@given(sizes=SIZES, steps=st.lists(STEP, max_size=30))
def test_bytes_are_always_those_of_the_source(
    sizes: int | np.ndarray, steps: list[tuple[str, object]]
) -> None:
    """Reads with repeats, orders kept and not kept, errors, damage, restarts, new generations."""
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(sizes, folder)
        for what, value in steps:
            scene.step(what, value)
        scene.cache.close()
        read_checked(scene.reader, scene.source, np.arange(COUNT))
