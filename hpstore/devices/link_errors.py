"""What goes wrong with calls on a disk of another host, as errors of here."""

from __future__ import annotations

import errno
import ssl
from typing import NoReturn, TypeGuard

from hpstore.devices.horizon_guard import RecordReplaced
from hpstore.errors import (
    DescriptorsExhausted,
    DeviceDenied,
    DeviceError,
    DeviceFull,
    DeviceInUse,
    DeviceMissing,
    DeviceReadOnly,
    DeviceTimeout,
    HpstoreError,
    IntegrityError,
    LockTimeout,
    ReadAbandoned,
)
from hpstore.format.host_calls import ABSENT, FAILED, GONE, REFUSED, decode_json
from hpstore.runtime.lacks import note_lack
from hpstore.runtime.open_file_limit import exhausted_hint, note_exhausted

_KINDS: dict[str, type[HpstoreError]] = {
    kind.__name__: kind
    for kind in (
        DeviceDenied,
        DeviceError,
        DeviceFull,
        DeviceInUse,
        DeviceMissing,
        DeviceReadOnly,
        DeviceTimeout,
        IntegrityError,
        LockTimeout,
        ReadAbandoned,
        RecordReplaced,
    )
}


_OF_DISKS = frozenset({"hello", "stamp", "usage", "probe", "counter_sector", "listings"})
_OF_OPENING = _OF_DISKS | {"read_small"}
"""Calls that open or watch a disk. Any error in their answers counts as a failure of that disk
alone, whatever the service calls it."""


class HandleGone(DeviceError):
    """The service knows no such handle: it was restarted, or had given this process up."""


class LinkErrors:
    """Of one disk. Thread-safe: it has nothing but the URL."""

    def __init__(self, url: str) -> None:
        self.url = url

    def raise_answer(self, operation: str, status: int, data: bytes) -> NoReturn:
        """Raise what the service says of a call that was not carried out, or failed."""
        try:
            said = decode_json(data)
        except IntegrityError as error:
            raise self.nonsense(operation, error) from error
        found = said if isinstance(said, dict) else {}
        name, text = str(found.get("error", "")), str(found.get("text", ""))[:2000]
        if status == GONE:
            raise HandleGone(f"device {self.url}: {text}", device=self.url)
        if status == REFUSED:
            raise self._denied(f"device {self.url}: {text}")
        if name == ABSENT and (status != FAILED or operation in _OF_DISKS):
            name = ""
        raised = self.error_of(name, text)
        ours = isinstance(raised, DeviceError | IntegrityError | FileNotFoundError)
        if operation in _OF_OPENING and not ours:
            raise DeviceError(str(raised), device=self.url)
        raise raised

    def _denied(self, text: str) -> DeviceDenied:
        """What this process may not do there, noted as a lack of it."""
        note_lack(DeviceDenied, text)
        return DeviceDenied(text, device=self.url)

    def error_of(self, name: str, text: str) -> Exception:
        """What the service says of a call that failed, as an error of here."""
        text = f"device {self.url}: {text}"
        if name == ABSENT:
            return FileNotFoundError(errno.ENOENT, text)
        return _KINDS.get(name, DeviceError)(text, device=self.url)

    def nonsense(self, operation: str, what: object) -> DeviceError:
        return DeviceError(
            f"device {self.url}: what answers {operation} there does not follow the protocol of "
            f"hpstore's hosts ({what})",
            device=self.url,
        )

    def raise_broken(self, error: OSError, operation: str, *, again: bool = True) -> NoReturn:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            note_exhausted()
            raise DescriptorsExhausted(
                f"{operation} was not tried on device {self.url}: {exhausted_hint()}",
                device=self.url,
            ) from error
        if _is_refused(error, again=again):
            reason = getattr(error, "verify_message", "") or error.reason or str(error)
            raise self._denied(
                f"device {self.url}: {operation} was refused by TLS: {reason}. Look at the "
                "certificates of this user and of the host; `hpstore host init` makes them"
            ) from error
        reason = error.strerror or str(error)
        done = "" if again else " What was called may have happened."
        raise DeviceMissing(
            f"device {self.url}: {operation} failed: {reason}. Is the host up, and does "
            f"`hpstore host serve` run there?{done}",
            device=self.url,
        ) from error


def _is_refused(error: OSError, *, again: bool) -> TypeGuard[ssl.SSLError]:
    """Whether TLS let no call through. In the middle of an exchange only the other side's word for
    it is certain: it reads no call before it has let the caller in."""
    if not isinstance(error, ssl.SSLError) or isinstance(error, ssl.SSLEOFError):
        return False
    return again or "ALERT" in (error.reason or "")
