"""Which version of a key is read, and opening it (PROTOCOL 7)."""

from __future__ import annotations

from hpstore.errors import IntegrityError, ObjectNotFound, TooManyErasures
from hpstore.format.keys import ContentId, Kind
from hpstore.objects.context import READ_PATIENCE, PoolContext
from hpstore.objects.object_info import version_token
from hpstore.objects.read.object_reader import Changed, ObjectReader
from hpstore.objects.survey import (
    ColumnFile,
    Layout,
    Survey,
    VersionVerdict,
    judge,
    survey_key,
    unknown_devices,
)
from hpstore.objects.survey_limits import require_known, require_newest, too_many
from hpstore.runtime.lacks import blamed, lacks_total

RESOLVE_TRIES = 8  # a reader meets at most this many replacements of its key in a row


def open_survey(
    store: PoolContext,
    survey: Survey,
    content: ContentId | None = None,
    *,
    whole: bool = False,
    patient: bool = True,
) -> ObjectReader:
    """Open the newest version of a survey, or the one with that content. PROTOCOL 7.

    `whole` and `patient` as of ObjectReader.

    Raises ObjectNotFound, TooManyErasures when acknowledged data may be there but cannot be read,
    Changed when files moved underneath.
    """
    groups: dict[tuple[int, int], list[Layout]] = {}
    for layout in survey.layouts():
        if content is None or layout.version.content == content:
            groups.setdefault(layout.version.content, []).append(layout)
    for layouts in groups.values():
        if any(layout.kind is Kind.TOMBSTONE for layout in layouts):
            require_newest(store.view, survey, layouts)
            raise ObjectNotFound(f"object {survey.key!r} was deleted", key=survey.key)
        if content is None:
            require_newest(store.view, survey, layouts)
        reader = _open_group(store, survey, layouts, whole, patient)
        if reader is not None:
            return reader
    require_known(store.view, survey)
    if content is None:
        raise ObjectNotFound(f"no object {survey.key!r}", key=survey.key)
    raise ObjectNotFound(
        f"no version {version_token(*content)} of object {survey.key!r}: it was removed when a "
        "newer one was whole, or was never stored. `hpstore versions` lists what there is.",
        key=survey.key,
    )


def _open_group(
    store: PoolContext, survey: Survey, layouts: list[Layout], whole: bool, patient: bool
) -> ObjectReader | None:
    """Open the best layout of one version's content; None when all are torn puts."""
    unclear: TooManyErasures | None = None
    for layout in layouts:
        reader = ObjectReader(
            store, layout, survey.key, unknown=survey.unknown, whole=whole, patient=patient
        )
        try:
            if reader.open_enough():
                return reader
        except BaseException:
            reader.close()
            raise
        unknown = unknown_devices(store.view, survey)
        valid, corrupt = len(reader.columns), len(reader.damaged)
        reader.close()
        verdict = judge(layout, valid=valid, corrupt=corrupt, unknown_devices=unknown)
        if verdict is not VersionVerdict.TORN:
            unclear = too_many(survey.key, layout, valid, corrupt, unknown)
            unclear.away |= reader.away
    if unclear is not None:
        raise unclear
    store.metrics.count("torn_put_passed_total")
    return None


def open_object(
    store: PoolContext,
    key: str,
    content: ContentId | None = None,
    *,
    whole: bool = False,
    patient: bool = False,
) -> ObjectReader:
    """Resolve a key and open its newest version, or the one with that `content`; again when it
    changes underneath, a bounded number of times.

    A listing of several devices is no snapshot: what looks torn or absent is believed only when a
    second look shows the same files, or none again. The first look does without a device that is
    slow to answer; what is unclear then gets its full deadline, with `patient` at once. `whole` as
    of ObjectReader.
    """
    seen: set[ColumnFile] | None = None
    patience: float | None = None if patient else READ_PATIENCE
    before = lacks_total()
    for _ in range(RESOLVE_TRIES):
        view = store.view
        survey = survey_key(store, key, patience=patience)
        try:
            return open_survey(store, survey, content, whole=whole, patient=patience is None)
        except Changed:
            store.metrics.count("read_resolved_again_total")
            seen = None
        except (ObjectNotFound, TooManyErasures) as error:
            if seen == set(survey.files):
                if isinstance(error, TooManyErasures) and store.look_again(view):
                    seen = None
                    continue
                raise blamed(error, before) from error.__cause__
            seen = set(survey.files)
            if isinstance(error, TooManyErasures) or not survey.deleted:
                patience = None
    raise IntegrityError(f"object {key!r} was replaced {RESOLVE_TRIES} times while it was opened")
