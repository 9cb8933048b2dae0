"""Errors of an object store by their kinds: what failed, on which device, and what to do. Pure.

A client's text holds the server's whole answer and its own state. Of that only the code, the status
and the kind are taken, each bounded, so that no secret and no page of XML reaches a log.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpstore.devices.base import denied
from hpstore.errors import DeviceError, DeviceFull, DeviceMissing, DeviceReadOnly, DeviceTimeout

_CODE = re.compile(r"<Code>\s*([A-Za-z0-9._-]{1,64})\s*</Code>")
_STATUS = re.compile(r"(?:status code|status): (\d{3})\b")
_KIND = re.compile(r"\bkind: (Connect|Timeout|Request|Decode|Interrupted|Unknown)\b")
_TEXT_BYTES_MOST = 60_000  # of an answer that is looked at

_KEYS = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthorizationHeaderMalformed"}
_SESSION = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired"}
_FULL = {"QuotaExceeded", "XMinioAdminBucketQuotaExceeded", "XMinioStorageFull", "StorageFull"}
_FULL |= {"InsufficientStorage", "NoSpaceLeftOnDevice", "InsufficientCapacity"}
_BUSY = {"SlowDown", "ServiceUnavailable", "RequestLimitExceeded", "InternalError"}
GONE_STATUS = "NoSuchBucket"


class BeyondEnd(DeviceError):
    """A range begins where the file has ended: any does in an empty one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAnswer:
    """What a client's error says. `code` and `kind` are "" and `status` is 0 where it does not."""

    code: str
    status: int
    kind: str
    beyond: bool  # a range begins where the file has ended

    @classmethod
    def of(cls, error: BaseException) -> StoreAnswer:
        """Of an exception of obstore, by its text: it has no fields."""
        text = str(error)[:_TEXT_BYTES_MOST]
        code, status, kind = _CODE.search(text), _STATUS.search(text), _KIND.search(text)
        return cls(
            code=code[1] if code else "",
            status=int(status[1]) if status else 0,
            kind=kind[1] if kind else "",
            beyond=bool(status and status[1] == "416") or "StartTooLarge" in text,
        )

    @property
    def brief(self) -> str:
        """For a message."""
        parts = [f"HTTP {self.status}" if self.status else "", self.code, self.kind.lower()]
        return " ".join(filter(None, parts)) or "no answer that names a reason"


def store_error(
    error: BaseException, *, url: str, operation: str, endpoint: str, credentials: str
) -> Exception:
    """The error of a device for one of its client: a DeviceError, or FileNotFoundError.

    `endpoint`: where the store is, "" for AWS; `credentials`: the reference that was used.
    """
    answer, name = StoreAnswer.of(error), type(error).__name__
    said = f"{operation} failed on device {url}"
    server = endpoint or "the endpoint of AWS"
    if answer.code == GONE_STATUS:
        return DeviceMissing(
            f"{said}: its bucket does not exist at {server}. Nothing was made there; check the URL "
            "and the endpoint, or make the bucket.",
            device=url,
        )
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"{operation} on device {url}: no such file")
    if refusal := _refusal(answer, name, server, credentials or "in the environment"):
        return denied(PermissionError(refusal), url, operation)
    if answer.beyond:
        return BeyondEnd(f"{said}: it ends before what was asked for", device=url)
    if answer.code in _FULL or answer.status == 507:
        return DeviceFull(f"{said}: the store has no space left ({answer.brief})", device=url)
    if answer.code in ("MethodNotAllowed", "ReadOnly"):
        return DeviceReadOnly(f"{said}: the store takes no writes ({answer.brief})", device=url)
    if answer.kind == "Timeout" or isinstance(error, TimeoutError):
        return DeviceTimeout(
            f"{said}: {server} did not answer in time. The request may still be carried out.",
            device=url,
        )
    if answer.kind == "Connect":
        return DeviceMissing(
            f"{said}: no connection to {server}. Is it running, and its name and port right?",
            device=url,
        )
    if answer.code in _BUSY or answer.status in (429, 500, 502, 503, 504):
        return DeviceError(
            f"{said}: {server} is overloaded or failing ({answer.brief})", device=url
        )
    if name == "NotSupportedError":
        return DeviceError(
            f"{said}: {server} does not answer ranges of a file, which hpstore needs", device=url
        )
    return DeviceError(f"{said}: {answer.brief} ({name})", device=url)


def _refusal(answer: StoreAnswer, name: str, server: str, credentials: str) -> str:
    """Why a server gives this process no access; "" where it is not that."""
    if answer.code == "RequestTimeTooSkewed":
        return (
            f"the clock of this machine and that of {server} differ by more than it allows "
            "(RequestTimeTooSkewed). Set the clocks (NTP)"
        )
    if answer.code in _FULL:
        return ""
    if name == "UnauthenticatedError" or answer.code in _KEYS | _SESSION or answer.status == 401:
        what = (
            "says that the session is over" if answer.code in _SESSION else "does not take the key"
        )
        return f"{server} {what} ({answer.brief}). Look at credentials {credentials!r}"
    if name == "PermissionDeniedError" or answer.status == 403:
        return (
            f"{server} allows it no access ({answer.brief}): wrong key, a policy, or a clock that "
            f"is off. Look at credentials {credentials!r}"
        )
    return ""
