"""A restore by all ranks of a job: the same step everywhere, or a word why not (PROTOCOL 20)."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from hpstore.checkpoint.catalog.left_saves import end_left_saves
from hpstore.checkpoint.catalog.left_writers import WriterRecord
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.format.checkpoint_manifest import Manifest
from hpstore.checkpoint.ranks.collectives import RankChannel, Ranks
from hpstore.checkpoint.restore.fill_state import RestoreReport, restore_state
from hpstore.checkpoint.restore.restore_plan import RestoreOptions, RestorePlan, plan_restore
from hpstore.checkpoint.state.targets import State
from hpstore.checkpoint.tiers.nearest_step import StepCandidate, listed_steps, newest_untried
from hpstore.errors import (
    CheckpointError,
    CheckpointMismatch,
    HpstoreError,
    IntegrityError,
    ObjectNotFound,
    RedundancyError,
    without_promise,
)
from hpstore.runtime.lacks import blamed, lacks_total

_log = logging.getLogger(__name__)
_PASSABLE = (IntegrityError, RedundancyError, ObjectNotFound)  # an older step may be readable


def restore_together(
    ranks: Ranks,
    steps: StepCatalog,
    state: State,
    step: int | None,
    how: RestoreOptions,
    tiers: Sequence[StepCatalog] = (),
) -> tuple[Manifest, RestoreReport] | None:
    """Restore `step`, or the newest that all ranks can read; None when there is no checkpoint.

    Of several pools that have it, the first in which it can be read: `steps`, then `tiers`.
    Collective. Raises what no older step would mend, such as a mismatch, on all ranks.
    """
    settle_left(ranks, steps)
    touched: set[str] = set()
    tried: set[StepCandidate] = set()
    catalogs = (steps, *tiers)
    failed: Exception | None = None
    while (candidate := _next(ranks, catalogs, step, tried)) is not None:
        tried.add(candidate)
        catalog, number = catalogs[candidate.pool], candidate.step
        try:
            found = _try(ranks, catalog, state, number, how, touched, listed=candidate.listed)
        except HpstoreError as error:
            if not touched:
                raise
            # what it says of this state is of its own step, or of another rank
            raise type(error)(
                f"{without_promise(error)}{_parts(touched)}", device=error.device, key=error.key
            ) from error
        if not isinstance(found, Exception):
            _warn_of_parts(found[1])
            if ranks.leads:
                found[1].log()
            if not candidate.pool:
                return found
            name = catalog.pool.config.name
            _log.warning("step %d is restored from %s, not from the first pool", number, name)
            return found[0], replace(found[1], tier=name)
        failed = failed or found
        _log.warning("checkpoint step %d is passed over: %s", number, found)
    if failed is not None and step is not None:
        raise steps.placed(failed, step, _parts(touched))
    if tried:
        raise CheckpointError(
            f"none of the {len({each.step for each in tried})} checkpoints under {steps.prefix!r} "
            "can be read now. Nothing was deleted; bring missing devices back and try again."
            f"{_parts(touched)}"
        )
    return None


def settle_left(ranks: Ranks, steps: StepCatalog) -> None:
    """Wait for the writers of dead trainers on the hosts of all ranks, and end those that take too
    long: a restore sees what they commit, and saves after it meet nothing of them. Collective."""
    left = steps.left.wait(ranks.timeout_seconds / 2 if ranks.world > 1 else None)
    mine = json.dumps([asdict(record) for record in left]).encode()
    heard = ranks.all_gather(mine, RankChannel.TRAINER)
    if ranks.leads:
        rows = {json.dumps(row): row for said in heard for row in json.loads(said)}
        end_left_saves(steps, [WriterRecord(**row) for row in rows.values()])


def _next(
    ranks: Ranks,
    catalogs: Sequence[StepCatalog],
    step: int | None,
    tried: Collection[StepCandidate],
) -> StepCandidate | None:
    """What to try now, the same on all ranks. Steps are listed before each try: beside a process
    that saves, the newest of an older list may be gone, and a newer one there."""
    asked = [] if step is None else [StepCandidate(step=step, pool=0, listed=False)]
    if asked and len(catalogs) == 1:
        return newest_untried(asked, tried)
    found = _agreed_steps(ranks, catalogs)
    if asked:
        found = [each for each in found if each.step == step] or asked
    return newest_untried(found, tried)


def _parts(touched: set[str]) -> str:
    """For an error: what a read that failed in the middle leaves in the caller's tensors."""
    if not touched:
        return " Nothing in the state was changed."
    return (
        f" {len(touched)} tensors of the state, such as {min(touched)!r}, may hold parts of it: "
        "restore another step into them, or build them anew, before they are used."
    )


def _warn_of_parts(report: RestoreReport) -> None:
    """With strict=False an older step may lack what a damaged one was read into."""
    names = report.half_written
    if names:
        _log.warning(
            "step %d was restored, but %d tensors that it lacks, such as %r, may hold parts of a "
            "damaged later step: last_restore.half_written lists them. Build them anew.",
            report.step,
            len(names),
            names[0],
        )


def _agreed_steps(ranks: Ranks, catalogs: Sequence[StepCatalog]) -> list[StepCandidate]:
    """Rank 0 lists; all restore the same steps."""
    if ranks.world == 1:
        return listed_steps(catalogs)
    try:
        found = listed_steps(catalogs) if ranks.leads else []
        mine = json.dumps([[each.step, each.pool] for each in found]).encode()
    except (HpstoreError, OSError) as error:
        ranks.broadcast(json.dumps(str(error)).encode(), RankChannel.TRAINER)
        raise
    heard: list[list[int]] | str = json.loads(ranks.broadcast(mine, RankChannel.TRAINER))
    if isinstance(heard, str):
        raise CheckpointError(f"rank 0 cannot list the steps: {heard}")
    return [StepCandidate(step=number, pool=pool) for number, pool in heard]


def _try(
    ranks: Ranks,
    steps: StepCatalog,
    state: State,
    step: int,
    how: RestoreOptions,
    touched: set[str],
    *,
    listed: bool,
) -> tuple[Manifest, RestoreReport] | Exception:
    """Restore one step; what went wrong on any rank, when it can be passed over."""
    error: Exception | None = None
    before = lacks_total()
    plan: RestorePlan | None = None
    manifest: Manifest | None = None
    try:
        if ranks.leads:
            steps.settle(step)
        manifest = _manifest(steps, step, listed=listed)
        plan = plan_restore(manifest, state, how, several=ranks.world > 1)
        plan.transform(steps.pool, how)
        plan.find_misfits(how)
    except Exception as found:  # noqa: BLE001 (told to the other ranks, then raised)
        error = blamed(found, before)
    agreed = _Agreed(skipped=plan.skipped if plan is not None else {})
    if ranks.world > 1:  # what no rank takes is found before anything is filled
        agreed = _agree(ranks, step, error, plan, strict=how.strict)
        if agreed.error is not None:
            return agreed.error
    done: RestoreReport | None = None
    if error is None and plan is not None:
        try:
            plan.skip(agreed.skipped, how)
            done = restore_state(steps.pool, plan, state, how, touched)
        except Exception as found:  # noqa: BLE001 (as above)
            error = blamed(found, before)
    outcome = _agree(ranks, step, error, None, strict=False).error
    if outcome is not None or manifest is None or done is None:
        return outcome or IntegrityError(f"step {step} was not restored")
    return manifest, replace(done, unexpected=(*done.unexpected, *agreed.untaken))


def _manifest(steps: StepCatalog, step: int, *, listed: bool) -> Manifest:
    """A step's manifest. Raises ObjectNotFound, which can be passed over, for one that was `listed`
    and is gone: retention of another process took it for a newer step (PROTOCOL 19)."""
    try:
        return steps.manifest(step)
    except CheckpointError as error:
        if listed and isinstance(error.__cause__, ObjectNotFound):
            raise error.__cause__ from error
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class _Agreed:
    """What all ranks found. `error`: why all pass this step over. `untaken`: what no rank takes.
    `skipped`: what does not fit on one of them, and so is loaded on none."""

    error: Exception | None = None
    untaken: Sequence[str] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)


def _agree(
    ranks: Ranks, step: int, error: Exception | None, plan: RestorePlan | None, *, strict: bool
) -> _Agreed:
    """Tell each other how it went. Raises an error that cannot be passed over."""
    said = "" if error is None else f"rank {ranks.rank}: {error}"
    fatal = error is not None and not isinstance(error, _PASSABLE)
    left = plan.untaken if plan is not None else []
    skipped = plan.skipped if plan is not None else {}
    choice = plan.choice if plan is not None else ""
    mine = json.dumps([said, fatal, choice, left, skipped]).encode()
    votes = [json.loads(vote) for vote in ranks.all_gather(mine, RankChannel.TRAINER)]
    if fatal and error is not None:
        raise error
    others = "; ".join(text for text, *_ in votes if text)
    if any(worst for _, worst, *_ in votes):
        raise CheckpointError(f"step {step} could not be restored: {others}")
    if error is not None:
        return _Agreed(error=error)
    if others:
        return _Agreed(error=IntegrityError(f"step {step} cannot be read on all ranks: {others}"))
    if len({theirs for _, _, theirs, *_ in votes}) > 1:
        raise CheckpointMismatch(
            f"the ranks differ in what load= chooses of step {step}: give all of them the same "
            "LoadOptions. Nothing was changed."
        )
    nobodys = sorted(set[str].intersection(*(set(names) for *_, names, _ in votes)))
    if strict and nobodys:
        raise CheckpointMismatch(
            f"step {step} holds what no rank takes: {nobodys[:8]}. Nothing was changed; pass "
            "strict=False to load what fits."
        )
    together: dict[str, str] = {}
    for *_, some in votes:
        together |= some
    return _Agreed(untaken=nobodys, skipped=together)
