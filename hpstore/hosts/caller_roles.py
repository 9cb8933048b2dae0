"""What callers of a host's service may do, by the role in their certificate."""

from __future__ import annotations

from enum import IntEnum

from hpstore.errors import DeviceDenied


class RoleTooLow(DeviceDenied):
    """The certificate of a caller does not allow the call."""


class CallerRole(IntEnum):
    """What a caller may do; each includes those below it."""

    READER = 1
    WRITER = 2
    KEEPER = 3


def require(role: CallerRole, least: CallerRole, what: str) -> None:
    """Raise RoleTooLow where a caller may not do that."""
    if role < least:
        raise RoleTooLow(
            f"{what} needs the role {least.name.lower()}; the certificate of the caller has "
            f"{role.name.lower()}"
        )
