"""Puts and deletes with a condition, and the end of such, under a claim of the key (PROTOCOL 6)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from functools import partial

from hpstore.agreement.claims import ClaimLost, Claims, KeyClaim
from hpstore.agreement.registers import key_register
from hpstore.errors import (
    HpstoreError,
    LockTimeout,
    RegistersForeign,
    RegistersUnavailable,
    VersionConflict,
    without_promise,
)
from hpstore.format.column_header import Metadata
from hpstore.format.keys import Kind, Version
from hpstore.objects.context import PATIENCE, PoolContext
from hpstore.objects.object_info import ObjectInfo, version_token
from hpstore.objects.survey import newest_by_name, stable_survey, survey_keys
from hpstore.objects.survey_limits import require_known
from hpstore.objects.write.many_writes import is_plain, tombstones_together
from hpstore.objects.write.put import (
    MAYBE_DELETED,
    MAYBE_STORED,
    put_object,
    remove_replaced,
    say_maybe,
    write_tombstone,
)
from hpstore.objects.write.put_source import PutSource
from hpstore.objects.write.stripe_writer import Throttle

_TRIES = 8  # claims of one put that were taken over, in a row


def put_if(
    store: PoolContext,
    claims: Claims,
    key: str,
    source: PutSource,
    *,
    metadata: Metadata,
    if_absent: bool,
    if_version: str | None,
    throttle: Throttle,
    unit_bytes: int | None = None,
) -> ObjectInfo:
    """Store an object while its condition holds. Durable on return, and nothing came in between.

    Raises VersionConflict, LockTimeout, RegistersUnavailable, and what put_object raises. What was
    written when it raised may still become visible as a whole, unless a later put took its place.
    """
    left = False  # whether an attempt may be visible
    written: Version | None = None  # by an attempt whose claim was lost before it was given back
    for _ in range(_TRIES):
        claim = _taken(claims, key, MAYBE_STORED if left else "")
        token = if_version if written is None else version_token(*written.content)
        try:
            return put_object(
                store,
                key,
                source,
                metadata=metadata,
                if_absent=if_absent and written is None,
                if_version=token,
                throttle=partial(_throttle, store, claim, throttle),
                unit_bytes=unit_bytes,
                next_counter=claim.next_counter,
                acknowledge=partial(_acknowledge, claim, key),
            )
        except _WrittenInVain as error:  # it counts if nothing came, and it is put once more
            store.metrics.count("claim_lost_total")
            left, written = True, error.version
        except ClaimLost as error:  # before it could be acknowledged: look again, write again
            store.metrics.count("claim_lost_total")
            left = left or error.maybe_visible
        except BaseException as error:
            if written is not None and isinstance(error, VersionConflict) and error.key == key:
                raise _overtaken(key) from error
            if left and not getattr(error, "maybe_visible", False):  # of an earlier try
                say_maybe(error, MAYBE_STORED)
            raise
        finally:
            _drop(store, claim)
    failed = LockTimeout(
        f"conditional put of {key!r}: its claim was taken over {_TRIES} times in a row, so this "
        "process was stopped or too slow each time. Nothing was acknowledged; try again."
    )
    if left:
        say_maybe(failed, MAYBE_STORED)
    raise failed


def _taken(claims: Claims, key: str, before: str) -> KeyClaim:
    """The claim of a key. `before`: what an earlier try may have left, which an error says then."""
    try:
        return claims.take(key)
    except BaseException as error:
        if before:
            say_maybe(error, before)
        raise


class _WrittenInVain(ClaimLost):
    """A version is there whole, and the claim that it was written under is another process'."""

    version: Version


def _overtaken(key: str) -> VersionConflict:
    return VersionConflict(
        f"put of {key!r} was overtaken: this process was stopped or slow, another one took its "
        "claim over, and a later version is there. What it put may have been read before that.",
        key=key,
    )


def bar_puts(store: PoolContext, claims: Claims, key: str, *, removes: str | None = None) -> bool:
    """End the conditional puts of a key that have begun: none stores what is not there already.

    True when nothing is there: a tombstone is, above all that they may still publish, and they
    raise VersionConflict. False when an object is there, which may be of such a put; one of the
    version `removes` is deleted. Raises TooFewDevices, LockTimeout, RegistersUnavailable: then
    nothing is decided.
    """
    written = False
    for _ in range(_TRIES):
        claim = _taken(claims, key, MAYBE_DELETED if written else "")
        try:
            survey = stable_survey(store, key, absent=True, patience=PATIENCE)
            require_known(store.view, survey)
            newest = newest_by_name(store.view, survey)
            if (
                newest is not None
                and newest.kind is not Kind.TOMBSTONE
                and version_token(*newest.version.content) != removes
            ):
                return False
            columns = write_tombstone(store, key, survey, next_counter=claim.next_counter)
            written = True
            _give_back(claim, key, f"a tombstone of {key!r} was written, and may count or not")
            remove_replaced(store, key, survey, columns)
            store.deleted.append((columns.version.counter, key))
            return True
        except ClaimLost:
            store.metrics.count("claim_lost_total")
        finally:
            _drop(store, claim)
    raise LockTimeout(f"the claim of {key!r} was taken over {_TRIES} times in a row")


def remove_versions(
    store: PoolContext, claims: Claims, going: Mapping[str, str]
) -> dict[str, HpstoreError]:
    """Delete up to MOST_KEYS objects of which the newest version is still the one given; the errors
    of those for which that is not decided. Those that share a claim go together under it."""
    by_claim: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for key, version in going.items():
        by_claim[key_register(key)][key] = version
    failed: dict[str, HpstoreError] = {}
    for part in by_claim.values():
        begun: set[str] = set()
        try:
            left = part.keys() - _remove_together(store, claims, part, begun)
        except HpstoreError as error:
            failed |= dict.fromkeys(part, error)
            continue
        for key in left:
            try:
                bar_puts(store, claims, key, removes=part[key])
            except HpstoreError as error:
                if key in begun and not error.maybe_visible:
                    say_maybe(error, MAYBE_DELETED)
                failed[key] = error
    return failed


def _remove_together(
    store: PoolContext, claims: Claims, going: Mapping[str, str], begun: set[str]
) -> Collection[str]:
    """Delete those of which one look is enough, if they are several; which are durably gone.
    `begun` becomes those of which a tombstone may be there."""
    if len(going) == 1:
        return ()
    claim = claims.take(min(going))
    try:
        surveys = survey_keys(store, list(going), patience=PATIENCE, offers=True)
        here = {}
        for key, survey in surveys.items():
            newest = newest_by_name(store.view, survey)
            same = newest is not None and version_token(*newest.version.content) == going[key]
            if same and is_plain(store, survey, absent=False):
                here[key] = survey
        if not here:
            return ()

        claim.next_counter(max(v.counter for s in here.values() for v in s.versions()))

        def next_counter(seen: int) -> int:  # one for all: they are different keys
            return claim.counter if claim.counter > seen else claim.next_counter(seen)

        begun.update(here)
        gone = tombstones_together(store, here, next_counter)
        if gone:
            said = f"tombstones of {len(gone)} objects were written, and may count or not"
            _give_back(claim, min(gone), said)
    except ClaimLost:  # they are gone, or there with a version that came after
        store.metrics.count("claim_lost_total")
        return ()
    else:
        return gone
    finally:
        _drop(store, claim)


def _throttle(store: PoolContext, claim: KeyClaim, throttle: Throttle, nbytes: int) -> None:
    """Between batches: a long put shows that it lives."""
    throttle(nbytes)
    try:
        claim.keep()
    except (LockTimeout, RegistersUnavailable):
        store.metrics.count("claim_not_kept_total")  # the end decides


def _acknowledge(claim: KeyClaim, key: str, version: Version) -> None:
    """Everything is durable: it counts if the claim that it was written under can be given back.

    That it is still the newest is not enough: another process may have looked before it was there,
    and be about to write. Raises _WrittenInVain; RegistersUnavailable when it cannot be told.
    """
    try:
        said = f"put of {key!r} may have been stored, and is not acknowledged"
        _give_back(claim, key, said)
    except ClaimLost as error:
        lost = _WrittenInVain(str(error))
        lost.version = version
        raise lost from error


def _give_back(claim: KeyClaim, key: str, said: str) -> None:
    """Give a claim back under which something was written. Raises ClaimLost; RegistersUnavailable,
    which begins with what is `said`, where it is not known whether that counts."""
    try:
        claim.give_back()
    except (RegistersUnavailable, RegistersForeign, LockTimeout) as error:
        untold = RegistersUnavailable(
            f"{said}: {without_promise(error)} Look with stat() before you do it again.", key=key
        )
        untold.maybe_visible = True
        raise untold from error


def _drop(store: PoolContext, claim: KeyClaim) -> None:
    """Give back what is still held, so that others need not wait; they do if that fails."""
    try:
        if claim.held:
            claim.let_go()
    except HpstoreError:
        store.metrics.count("claim_not_given_back_total")
