"""Rules of checkpoints taken out, as in mutations.py. Imports are late: they need torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from hpstore.testing.simulation.machinery import STAGE

Exchange = Callable[[Any, str, object], None]  # module or class, name, what it is instead


def _retains_early(exchange: Exchange) -> None:
    """Rule 19: retention removes older steps before the manifest of the new one is there."""
    from hpstore.checkpoint.catalog.retention import Retention, decide
    from hpstore.checkpoint.save.commit import StepCommit

    before = StepCommit._publish

    def publish(commit: StepCommit, written: Sequence[Any]) -> object:
        step, steps = commit._options.step, commit._steps
        retention = Retention(keep_last=STAGE.now.setup.keep_last)
        for old in decide([*steps.all(), step], retention, committed=step, now_ms=0):
            if not old.stays:
                steps.delete(old.step)
        return before(commit, written)

    exchange(StepCommit, "_publish", publish)


def _ignores_notes(exchange: Exchange) -> None:
    """Rule 18: a collector does not look for notes of saves under way."""
    from hpstore.checkpoint.catalog.step_catalog import StepCatalog

    exchange(StepCatalog, "_attempts", lambda steps, listing, *, all_live=False: ({}, {}))


def _no_look_at_notes(exchange: Exchange) -> None:
    """Rule 18: a save does not look whether its note is still there."""
    from hpstore.checkpoint.save.save_traces import SaveTraces

    exchange(SaveTraces, "require_noted", lambda traces: None)


def _no_bar(exchange: Exchange) -> None:
    """Rule 18: the note of a dead save goes, its manifest's put is left to itself."""
    from hpstore.checkpoint.catalog import dead_saves

    exchange(dead_saves, "decide", lambda pool, manifest, *, replaces: None)


def _no_index(exchange: Exchange) -> None:
    """Rule 18: every manifest is a step, whenever it was put."""
    from hpstore.checkpoint.catalog.fence_record import FenceRecord

    exchange(FenceRecord, "counts", lambda record, step, version: True)


def _no_look_at_the_fence(exchange: Exchange) -> None:
    """Rule 18: a save does not look whether another session has taken the fence."""
    from hpstore.checkpoint.catalog.fence_record import read_fence
    from hpstore.checkpoint.save import commit

    exchange(commit, "require_fence", lambda pool, prefix, session: read_fence(pool, prefix))


def _lists_first(exchange: Exchange) -> None:
    """Rule 18: which steps there are is listed before the fence is taken."""
    from hpstore.checkpoint.catalog import run_index, writer_fence
    from hpstore.checkpoint.catalog.step_catalog import StepCatalog

    take, write = writer_fence.take_fence, writer_fence.write_index
    listed: list[StepCatalog] = []

    def take_later(pool: Any, prefix: str, session: str, **words: Any) -> None:
        listed[:] = [StepCatalog(pool, prefix)]
        listed[0].listing()
        take(pool, prefix, session, **words)

    def write_earlier(
        pool: Any, prefix: str, record: Any, manifests: dict[int, str], **words: Any
    ) -> None:
        write(pool, prefix, record, listed[0].manifests, **words)

    exchange(run_index, "take_fence", take_later)
    exchange(writer_fence, "write_index", write_earlier)


def _own_claims(exchange: Exchange) -> None:
    """Rule 18: manifests are put under claims of their own keys, not under that of the fence."""
    from hpstore.agreement import claims
    from hpstore.agreement.registers import bucket_of

    exchange(claims, "key_register", lambda key: f"key-{bucket_of(key):04d}")


def _withdraws(exchange: Exchange) -> None:
    """Rule 18, as it was: the note is looked at after the put, and without it the step goes."""
    from hpstore.checkpoint.catalog import dead_saves
    from hpstore.checkpoint.format.checkpoint_manifest import manifest_key
    from hpstore.checkpoint.save.commit import StepCommit
    from hpstore.checkpoint.save.save_traces import SaveTraces

    publish, look = StepCommit._publish, SaveTraces.require_noted

    def withdraw(commit: StepCommit, written: Sequence[Any]) -> object:
        report = publish(commit, written)
        try:
            look(commit._traces)
        except Exception:
            commit._pool.delete(manifest_key(commit._prefix, commit._options.step))
            raise
        return report

    exchange(dead_saves, "decide", lambda pool, manifest, *, replaces: None)
    exchange(SaveTraces, "require_noted", lambda traces: None)
    exchange(StepCommit, "_publish", withdraw)


def _lists_once(exchange: Exchange) -> None:
    """Rule 19: a restore goes by the steps that it has listed first."""
    from hpstore.checkpoint import checkpointer
    from hpstore.checkpoint.restore import collective_restore

    before = collective_restore.restore_together

    class Once:
        """Steps that are listed once."""

        def __init__(self, steps: Any) -> None:
            self._steps, self._listed = steps, steps.all()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._steps, name)

        def all(self) -> list[int]:
            """As they were."""
            return list(self._listed)

    exchange(
        checkpointer,
        "restore_together",
        lambda ranks, steps, *rest: before(ranks, Once(steps), *rest),  # type: ignore[arg-type]
    )


def _stops_at_gone_steps(exchange: Exchange) -> None:
    """Rule 19: a restore fails where retention has taken the manifest of the step that it tries."""
    from hpstore.checkpoint.restore import collective_restore

    exchange(collective_restore, "_manifest", lambda steps, step, *, listed: steps.manifest(step))


def _restores_older(exchange: Exchange) -> None:
    """A restore takes the step before the newest."""
    from hpstore.checkpoint.restore import collective_restore
    from hpstore.checkpoint.tiers.nearest_step import StepCandidate

    def untried(
        found: Iterable[StepCandidate], tried: Collection[StepCandidate]
    ) -> StepCandidate | None:
        left = sorted((each for each in found if each not in tried), key=lambda each: each.step)
        return left[-2] if len(left) > 1 else left[-1] if left else None

    exchange(collective_restore, "newest_untried", untried)


def _segments_first(exchange: Exchange) -> None:
    """A step is deleted segments first, its manifest last."""
    from hpstore.checkpoint.catalog.step_catalog import StepCatalog

    before = StepCatalog.delete

    def delete(steps: StepCatalog, step: int, *, force: bool = False) -> None:
        own = {segment.key for segment in steps.facts(step).objects}
        for key in own - steps.still_named(own, [step]):
            steps._delete_those_there([key])
        before(steps, step, force=force)

    exchange(StepCatalog, "delete", delete)


def _refers_blindly(exchange: Exchange) -> None:
    """Rule 18: a save refers to segments of an earlier step without looking whether they stay."""
    from hpstore.checkpoint.save.save_job import SaveJob

    exchange(SaveJob, "_referable", lambda job, references: set(references))


def _unsafe_segments(exchange: Exchange) -> None:
    """Rule 19: segments are not looked at before the manifest is put."""
    from hpstore.checkpoint.save.commit import StepCommit

    exchange(StepCommit, "_require_safe", lambda commit: None)


CHECKPOINT_MUTATIONS: dict[str, Callable[[Exchange], None]] = {
    "retains-early": _retains_early,
    "ignores-notes": _ignores_notes,
    "no-look-at-notes": _no_look_at_notes,
    "no-bar": _no_bar,
    "no-index": _no_index,
    "no-look-at-the-fence": _no_look_at_the_fence,
    "lists-first": _lists_first,
    "own-claims": _own_claims,
    "withdraws": _withdraws,
    "lists-once": _lists_once,
    "stops-at-gone-steps": _stops_at_gone_steps,
    "restores-older": _restores_older,
    "segments-first": _segments_first,
    "refers-blindly": _refers_blindly,
    "unsafe-segments": _unsafe_segments,
}
