"""Where the run of a loader stands: which epoch, how far, and what the next loop does. Pure.

Positions count the samples of an epoch that all ranks have handed out, or batches where a sampler
of the user's decides. A loop over an epoch has its last batch before it asks for more and finds the
end: a run that is cut between the two finds the end first when it is resumed, as torchdata's
StatefulDataLoader has it.
"""

from __future__ import annotations

from collections import deque

from hpstore.errors import ConfigError
from hpstore.units import whole_argument

HANDED_KEPT = 1024  # batches back to which consumed() may be called for the first time


class LoaderPosition:
    """One loader's. The loader tells what happens; iterators of its own go on meanwhile."""

    def __init__(self) -> None:
        self.epoch = self.position = 0
        self._begun = False  # an iterator has been made at or since this position
        self._asked: int | None = None  # the epoch that set_epoch wants next
        self._at_end = False  # the loop over the epoch before has its last batch, not its end
        self._finds_end = False  # the next loop is that one, resumed
        self._handed: deque[tuple[int, int]] = deque()  # states after batches
        self._before = (0, 0)  # the state before the first of them
        self._consumed: tuple[int, int] | None = None  # a wrapper says what counts

    def begin(self, asked: int | None = None) -> bool:
        """A loop begins, at (epoch, position) then; False when it is one that was resumed behind
        its last batch, and has nothing. `asked`: the epoch that a sampler of the user's was set to.
        """
        if self._finds_end:
            self._finds_end = False
            if asked != self.epoch:
                return False
        if self._begun and self.position:
            self.epoch, self.position = self.epoch + 1, 0
        if self._asked is not None and self._asked != self.epoch:
            self.set_epoch(self._asked)  # an iterator went on with another one meanwhile
        self._begun, self._asked, self._at_end = True, None, False
        return True

    def moved(self, after: tuple[int, int]) -> None:
        """A batch was handed out; the run stands at (epoch, position) now."""
        self._handed.append(after)
        if len(self._handed) > HANDED_KEPT and self._consumed is None:
            self._before = self._handed.popleft()
        self.epoch, self.position = after
        self._begun = bool(self.position)  # at 0 the next loop is over this very epoch
        if not self.position:
            self._at_end = True

    def ended(self, epoch: int) -> None:
        """A loop has found the end of an epoch; other ranks may have had one batch more."""
        if (self.epoch, self.position) == (epoch + 1, 0):
            self._at_end = False
        if epoch != self.epoch:
            return
        after = self.epoch, self.position = epoch + 1, 0
        self._begun = False
        if self._handed:
            self._handed[-1] = after
        elif self._consumed is not None:
            self._consumed = after
        else:
            self._before = after

    def set_epoch(self, epoch: int) -> None:
        """As DataLoader.set_epoch."""
        whole_argument("epoch", epoch, least=0)
        if self._finds_end and epoch == self.epoch - 1:
            return
        self._finds_end = self._at_end = False
        self._begun = False
        self._asked = None if epoch == self.epoch else int(epoch)
        if epoch != self.epoch:
            self.epoch, self.position = int(epoch), 0
            self._restart_counting()

    def saved(self) -> tuple[int, int, bool]:
        """(epoch, position, whether a loop has yet to find the end of the epoch before)."""
        if self._consumed is not None:
            return *self._consumed, False
        return self.epoch, self.position, self._at_end

    def load(self, epoch: int, position: int, *, at_end: bool) -> None:
        """Stand where a run was saved."""
        self.epoch, self.position = epoch, position
        self._begun, self._asked = False, None
        self._at_end = self._finds_end = at_end
        self._restart_counting()

    def copied(self) -> None:
        """In the copy of a loader, whose iterators were not copied: it goes on from here."""
        self._begun, self._finds_end = False, self._at_end

    def _restart_counting(self) -> None:
        """What was handed out before says nothing any more."""
        self._handed.clear()
        self._before, self._consumed = (self.epoch, self.position), None

    def consumed(self, batches: int) -> None:
        """As DataLoader.consumed."""
        if whole_argument("batches", batches, least=0) > len(self._handed):
            raise ConfigError(f"{batches} batches consumed, {len(self._handed)} were handed out")
        if self._consumed is None:
            self._consumed = self._before
        for _ in range(batches):
            self._consumed = self._handed.popleft()
