"""Who may call a host's service, and what they may do there."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Callable
from dataclasses import dataclass

from hpstore.hosts.caller_roles import CallerRole
from hpstore.runtime.mutual_tls import Caller, TlsFiles

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A connection that may call. `who`: a name for sessions and logs. `until_seconds`: when its
    certificate ends, by the monotonic clock. `refused`: why it may do nothing, which is the answer
    to its first call; "" for one that may."""

    sock: socket.socket
    who: str
    role: CallerRole
    until_seconds: float = math.inf
    refused: str = ""


Admit = Callable[[socket.socket, str], Admitted]


def admit_all(sock: socket.socket, address: str) -> Admitted:
    """Without TLS: whoever can connect may do all. For private networks."""
    return Admitted(sock=sock, who=address, role=CallerRole.KEEPER)


def admit_certified(files: TlsFiles) -> Admit:
    """By certificates of the files' authority. Raises OSError for any other caller; one without a
    role is refused by an answer, which is read where the end of a connection says nothing."""

    def admit(sock: socket.socket, address: str) -> Admitted:
        secured, caller = files.answer(sock)
        role = role_of(caller)
        refused = f"the certificate of {caller.name} has no role, or several" if not role else ""
        return Admitted(
            sock=secured,
            who=f"{caller.name} at {address}",
            role=role or CallerRole.READER,
            until_seconds=caller.until_seconds,
            refused=refused,
        )

    return admit


def role_of(caller: Caller) -> CallerRole | None:
    """The one role of a certificate; None for none, several, or one that is not known here."""
    known = {role.name.lower(): role for role in CallerRole}
    return known.get(caller.roles[0]) if len(caller.roles) == 1 else None
