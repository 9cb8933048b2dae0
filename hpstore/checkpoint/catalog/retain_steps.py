"""Retention of the steps in a catalog: look at them, decide, remove what does not stay."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from hpstore.checkpoint.catalog.retention import (
    Retention,
    RetentionRule,
    StepDecision,
    StepFacts,
    decide,
)
from hpstore.checkpoint.catalog.run_index import take_out
from hpstore.checkpoint.catalog.segment_safety import require_safe
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.catalog.writer_fence import manifests_of
from hpstore.checkpoint.format.checkpoint_manifest import manifest_key
from hpstore.errors import (
    CheckpointError,
    HpstoreError,
    ObjectNotFound,
    RedundancyError,
    TooFewDevices,
)

_log = logging.getLogger(__name__)
_STEPS_AT_ONCE = 32  # a crash among them leaves their segments to garbage collection


def retain(
    steps: StepCatalog,
    committed: int,
    retention: Retention,
    *,
    now_ms: int,
    held: Mapping[str, int] | None = None,
    session: str | None = None,
) -> None:
    """Remove what retention does not keep after `committed` was committed and is whole. Failing at
    it does not fail the save. `held`: what stays besides, by why. `session`: that has saved it, if
    one has: then the steps are no steps any more before anything of them goes, or it has lost the
    fence and nothing goes (PROTOCOL 19)."""
    if retention.keep_last is None:
        return
    try:
        there = {} if session else manifests_of(steps.pool, steps.prefix)
        decisions = decisions_after(steps, committed, retention, now_ms=now_ms, held=held)
        going = [decision.step for decision in decisions if not decision.stays]
        if going and session is not None:
            there = take_out(steps, going, committed, session)
        remove_steps(steps, going, there)
    except (HpstoreError, OSError) as error:
        _log.warning("retention under %r is postponed: %s", steps.prefix, error)


def remove_steps(steps: StepCatalog, going: Iterable[int], versions: Mapping[int, str]) -> None:
    """Delete steps that nothing protects: their manifests, then what no other step names.

    `versions`: of their manifests, listed before it was decided that they go. One that has another
    version by now was saved again: it stays, however long this process was stopped (PROTOCOL 19).
    Raises SomeFailed.
    """
    numbers = [step for step in going if step in versions]
    for at in range(0, len(numbers), _STEPS_AT_ONCE):
        segments: set[str] = set()
        part: dict[str, str] = {}
        for step in numbers[at : at + _STEPS_AT_ONCE]:
            with suppress(ObjectNotFound):  # another process has removed it
                segments |= steps.named_by(step, versions[step])
                part[manifest_key(steps.prefix, step)] = versions[step]
        try:
            steps.pool.admin.remove_versions(part)
        finally:
            for step in numbers[at : at + _STEPS_AT_ONCE]:  # those that are there are read again
                steps.forget(step)
        steps.remove_unnamed(segments)


def decisions_now(
    steps: StepCatalog, retention: Retention, *, now_ms: int, facts: bool = False
) -> list[StepDecision]:
    """What would become of each committed step, ascending, if retention ran now. Changes nothing.

    While the newest step is not whole, all stay (PROTOCOL 19). `facts`: name them in the reasons
    also where no rule needs them.
    """
    listed = steps.all()
    if not listed:
        return []
    newest = _committed_last(steps, listed)
    if not steps.is_whole(newest):
        reason = (
            f"step {newest}, the newest, or what it refers to, has not its full stripe: "
            "nothing goes before that is rebuilt"
        )
        rules = (RetentionRule.FRAGILE,)
        return [StepDecision(step=step, rules=rules, reason=reason) for step in listed]
    return decisions_after(steps, newest, retention, now_ms=now_ms, facts=facts)


def _committed_last(steps: StepCatalog, listed: Sequence[int]) -> int:
    """The step whose commit is the newest: not the greatest one where a run went back."""
    versions = steps.pool.admin.versions_under(f"{steps.prefix}/step-")
    return max(listed, key=lambda s: (versions.get(manifest_key(steps.prefix, s), ""), s))


def decisions_after(
    steps: StepCatalog,
    committed: int,
    retention: Retention,
    *,
    now_ms: int,
    facts: bool = False,
    held: Mapping[str, int] | None = None,
) -> list[StepDecision]:
    """What becomes of each step after `committed` was committed, as the pool is now."""
    listed = steps.all()
    return decide(
        listed,
        retention,
        committed=committed,
        now_ms=now_ms,
        protected={**steps.protected(), **(held or {})},
        facts=facts_of(steps, listed) if facts or retention.needs_facts else {},
        fragile=_fragile(steps, listed, committed, retention.keep_last or 0),
    )


def facts_of(steps: StepCatalog, listed: Iterable[int]) -> dict[int, StepFacts]:
    """What retention looks at in manifests, of those that can be read now; of the others the log
    says why not."""
    found = {}
    for step in listed:
        try:
            manifest = steps.facts(step)
        except (HpstoreError, OSError) as error:
            _log.warning("the manifest of step %d under %r: %s", step, steps.prefix, error)
        else:
            found[step] = StepFacts(created_ms=manifest.created_ms, metrics=manifest.metrics)
    return found


def _fragile(steps: StepCatalog, listed: Sequence[int], committed: int, keep_last: int) -> set[int]:
    """Those that may yet go and must not stand in for others: of the last `keep_last` those that
    one more loss would end, as a save under way leaves them (PROTOCOL 8)."""
    found: set[int] = set()
    lasting = 0
    for step in [step for step in reversed(listed) if step <= committed]:
        if lasting == keep_last:
            break
        try:
            if step not in steps.lasting and step != committed:
                require_safe(steps.pool, manifest_key(steps.prefix, step))
            steps.lasting.add(step)
            lasting += 1
        except (CheckpointError, RedundancyError, ObjectNotFound, TooFewDevices) as error:
            _log.warning(
                "step %d under %r does not count for retention: %s", step, steps.prefix, error
            )
            found.add(step)
    return found
