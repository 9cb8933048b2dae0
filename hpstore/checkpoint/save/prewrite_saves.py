"""Files for the first saves to overwrite, written in the background before they come.

Retention keeps `keep_last` steps, and one more is written before the oldest goes: so many saves
write into new blocks before the first of them overwrites what another has left.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.format.checkpoint_manifest import step_prefix
from hpstore.errors import HpstoreError, ThreadsExhausted
from hpstore.pool.pool import Pool
from hpstore.runtime.threads import start_thread
from hpstore.units import MIB

_log = logging.getLogger(__name__)
# of all devices together: a fifth or less of what one device takes, while the training begins
BYTES_PER_SECOND = {"fast": 512 * MIB, "gentle": 128 * MIB}
_CLOSE_SECONDS = 30.0
BEGIN_SECONDS = 0.5  # a job that restores does so first of all


class SpaceMaker:
    """Prepares space on a thread of its own. Holds while a save or a restore is under way."""

    def __init__(self, pool: Pool, steps: StepCatalog, keep_last: int, pace: str) -> None:
        self._pool, self._steps = pool, steps
        self._cycle = keep_last + 1
        self._rate = BYTES_PER_SECOND[pace]
        self._begun = 0  # saves
        self._go, self._stopped = threading.Event(), threading.Event()
        self._go.set()
        self._thread: threading.Thread | None = None

    def start(self, sizes: Sequence[int]) -> None:
        """Begin. `sizes`: of the segments of one step, of all ranks; none: as of the newest."""
        if not self._pool.admin.recycles:
            return
        thread = threading.Thread(
            target=self._run, args=(list(sizes),), name="hpstore-prepare", daemon=True
        )
        with suppress(ThreadsExhausted):  # saves then make their files as they go
            self._thread = start_thread(thread)

    def _run(self, sizes: list[int]) -> None:
        self._stopped.wait(BEGIN_SECONDS)
        if not self._proceed():
            return
        try:
            listed = self._steps.all()
            if not sizes and listed:
                segments = self._steps.facts(listed[-1]).segments
                own = step_prefix(self._steps.prefix, listed[-1])
                sizes = [s.size for s in segments if s.key.startswith(f"{own}/")]
            self._prepare(sizes, len(listed))
        except (HpstoreError, OSError, RuntimeError) as error:  # Runtime: the process is ending
            _log.warning("space for the first saves is not prepared: %s", error)

    def _prepare(self, sizes: list[int], there: int) -> None:
        """One set of files more at a time: saves that come meanwhile have less need of them."""
        for target in range(1, 2 * self._cycle):
            needed = min(self._cycle, max(1, self._cycle - there)) - self._begun
            if needed < 1 or not sizes or not self._proceed():
                return
            written = self._pool.admin.prepare_space(
                sizes,
                min(target, needed),
                proceed=self._proceed,
                rate_bytes_per_second=self._rate,
            )
            if target >= needed and not written:
                return

    def _proceed(self) -> bool:
        self._go.wait()
        return not self._stopped.is_set()

    @contextmanager
    def held(self) -> Iterator[None]:
        """A save begins, and comes first: nothing is prepared until release()."""
        self._begun += 1
        self._go.clear()
        try:
            yield
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """The save is over."""
        self._go.set()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Nothing is prepared while it is entered: a restore comes first, too."""
        self._go.clear()
        try:
            yield
        finally:
            self._go.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all is prepared that will be; False when that takes longer."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    def close(self) -> None:
        """Stop between two chunks; the file that is half written goes."""
        self._stopped.set()
        self._go.set()
        if not self.wait(_CLOSE_SECONDS):
            _log.warning("a thread still prepares space: a device hangs")
