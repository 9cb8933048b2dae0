"""Whether to save after a step: a policy, what was asked and saved before, and one answer for all
ranks."""

from __future__ import annotations

import time
from collections.abc import Callable

from hpstore.checkpoint.format.checkpoint_manifest import checked_step
from hpstore.checkpoint.ranks.collectives import RankChannel, Ranks, require_alike
from hpstore.checkpoint.save.save_policies import Moment, SavePolicy, checked_policy
from hpstore.errors import CheckpointError, ConfigError

_NO, _YES, _FAILED = range(3)  # what rank 0 says
SET_BACK_SECONDS = 3600.0  # a clock that goes back by more was wrong before: its new time counts


class SaveSchedule:
    """The policy of one Checkpointer. The constructor and due() are calls of all `ranks`.

    Answers that steps alone decide are computed by each rank; for others rank 0 looks at its clocks
    or calls the user's function, and reports the answer in one message of 16 bytes. A step that is
    asked about again gets the same answer, without a message, until it is saved: then False.
    """

    def __init__(
        self,
        policy: SavePolicy | None,
        ranks: Ranks,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._policy = None if policy is None else checked_policy("when", policy)
        require_alike(ranks, "when", str(policy), "some would save without the others")
        self._ranks, self._monotonic, self._wall = ranks, monotonic, wall
        self._completed: int | None = None  # the step last asked about, saved or restored
        self._answered: tuple[int, bool] | None = None  # the last question, and the answer
        self._saved: int | None = None
        self._since = monotonic()  # of the last save
        self._wall_seen = wall()

    def due(self, step: int) -> bool:
        """Checkpointer.should_save()."""
        policy, step = self._policy, checked_step(step)
        if policy is None:
            raise ConfigError(
                "this Checkpointer was made without when=: give it a policy, for example "
                'when=EverySteps(1000) | EveryInterval("30min")'
            )
        if step == self._saved:
            return False
        if self._answered is not None and self._answered[0] == step:
            return self._answered[1]
        moment = self._moment(step)
        answer = policy.due_by_step(moment)
        if not answer and not policy.by_step:
            answer = self._agreed(policy, moment)
        self._wall_seen = moment.wall_now
        self._completed, self._answered = step, (step, answer)
        if answer:
            self._since = self._monotonic()
        return answer

    def saved(self, step: int) -> None:
        """A save of `step` has begun, whether it was due or not."""
        if self._answered != (step, True):
            self._since = self._monotonic()  # else it counts from the answer
        self._completed = self._saved = step

    def restored(self, step: int) -> int:
        """The run goes on from `step`, which is returned: it may have gone back."""
        self._completed, self._answered, self._saved = step, None, step
        self._since = self._monotonic()
        return step

    def _moment(self, step: int) -> Moment:
        """What the policy is shown. Without a step before this one, that is the only one."""
        before, now = self._completed, self._wall()
        if now < self._wall_seen - SET_BACK_SECONDS:
            self._wall_seen = now
        return Moment(
            step=step,
            before=before if before is not None and before < step else step - 1,
            elapsed_seconds=self._monotonic() - self._since,
            wall_before=self._wall_seen,
            wall_now=max(now, self._wall_seen),
        )

    def _agreed(self, policy: SavePolicy, moment: Moment) -> bool:
        """Rank 0's answer, on all ranks. What its function raised is raised there, and said on the
        others."""
        answer, raised = _NO, None
        if self._ranks.leads:
            try:
                answer = _YES if policy.due(moment) else _NO
            except BaseException as error:  # noqa: BLE001 (raised below, when the others know)
                answer, raised = _FAILED, error
        step, answer = self._ranks.announced((moment.step, answer), RankChannel.TRAINER)
        if raised is not None:
            raise raised
        if step != moment.step:
            raise CheckpointError(
                f"rank {self._ranks.rank} asks whether to save step {moment.step}, rank 0 step "
                f"{step}: call should_save() on all ranks after the same steps. What was committed "
                "is untouched"
            )
        if answer == _FAILED:
            raise CheckpointError(
                f"whether to save step {step} is not known: the policy failed on rank 0 "
                f"({policy}), whose log has the reason. What was committed is untouched"
            )
        return answer == _YES
