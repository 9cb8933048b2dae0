"""What a restore may answer, given which steps were committed: the model of a run's checkpoints.

- What is restored is what one save of that step was given, byte for byte.
- A step that is committed is never saved again, and a save that is "not committed" never shows.
- While no more is lost than the newest committed step tolerates, a restore gives it, or a later
  one; it never goes back in time beside saves and retention of others (PROTOCOL 19).
- A session that another one has succeeded commits nothing (PROTOCOL 18).
- Retention keeps the last `keep_last` steps, whatever becomes of a save in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hpstore.testing.simulation.oracle import OPEN

PREFIX = "run"


@dataclass(slots=True, eq=False)
class Save:
    """One save of a step. Times are the simulation's device operations."""

    step: int
    value: int  # that its state holds
    called: int
    acknowledged: int = OPEN
    refused: bool = False  # its error said that it is not committed
    tolerates: int = 0  # losses, as it was acknowledged with
    who: str = ""
    session: str = ""  # of the Checkpointer that saves

    def __str__(self) -> str:
        state = (
            "not committed"
            if self.refused
            else f"committed at {self.acknowledged}"
            if self.acknowledged < OPEN
            else "unclear"
        )
        return f"save of step {self.step}, value {self.value}, by {self.who} ({state})"


@dataclass(slots=True)
class RunHistory:
    """All saves under one prefix."""

    keep_last: int = 2
    saves: list[Save] = field(default_factory=list)

    @property
    def next_step(self) -> int:
        """A step that no save was called with."""
        return 1 + max((save.step for save in self.saves), default=0)

    def committed(self, before: int = OPEN) -> Save | None:
        """The newest step that was committed before a moment."""
        done = [save for save in self.saves if save.acknowledged < before]
        return max(done, key=lambda save: save.step, default=None)

    def acknowledge(self, save: Save, now: int, tolerates: int) -> str:
        """A save is committed; what is wrong with that, "" where nothing is."""
        save.acknowledged, save.tolerates = now, tolerates
        for other in self.saves:
            if other is not save and other.step == save.step and other.acknowledged < OPEN:
                return f"{save} and {other}"
        return self._fence_problem(save)

    def _fence_problem(self, save: Save) -> str:
        """What is wrong with a save that was committed by a session which had lost the run when it
        was called; "" where nothing is. A session takes the run in its first save."""
        of_session = [other for other in self.saves if other.session == save.session]
        taken = min(other.acknowledged for other in of_session)
        for other in self.saves:
            if other.session == save.session or other.acknowledged > save.called:
                continue
            began = min(x.called for x in self.saves if x.session == other.session)
            if taken < began:
                return f"{save} in session {save.session}, after {other} in {other.session}"
        return ""

    def bytes_problem(self, step: int, value: int) -> str:
        """What is wrong with the content of a step that was restored; "" where nothing is."""
        found = [save for save in self.saves if save.step == step and save.value == value]
        if not found:
            return f"step {step} was restored with value {value}, which no save of it had"
        return f"{found[0]} was restored" if found[0].refused else ""

    def age_problem(self, step: int | None, began: int) -> str:
        """What is wrong with a restore that gave a step; "" where nothing is."""
        newest = self.committed(began)
        if newest is None or (step is not None and step >= newest.step):
            return ""
        return f"a restore that began at {began} gave step {step}; before it: {newest}"

    def must_be_there(self) -> list[Save]:
        """Committed steps that retention has to keep, whichever unclear saves are there."""
        possible = {save.step for save in self.saves if not save.refused}
        return [
            save
            for save in self.saves
            if save.acknowledged < OPEN
            and sum(step > save.step for step in possible) < self.keep_last
        ]
