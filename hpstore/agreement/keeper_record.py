"""The record of who decides for a pool over several hosts (PROTOCOL 17). Pure: JSON bytes.

It is small enough for a register on devices, and not among those that a move of registers takes
along: another place begins with none.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from hpstore.agreement.registers import Register
from hpstore.format.untrusted_bytes import parsing, whole

_HOST_CHARACTERS = 40
_MARK_CHARACTERS = 20  # of a nonce, a run, what is closed


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperRecord:
    """`epoch` rises with each keeper, `beat` with each renewal. `nonce` is the keeper's, "" where
    none has it. `run`: its run directory and boot, which one agent at a time has. `closed`: the
    beginning of the id of a device that it closed for an eviction under way, "+" before it where
    that of the device's whole host."""

    epoch: int = 0
    nonce: str = ""
    host: str = ""
    process: int = 0
    run: str = ""
    beat: int = 0
    closed: str = ""

    def encode(self) -> bytes:
        """For the register."""
        host = self.host.encode("ascii", "replace").decode()[:_HOST_CHARACTERS]
        body = {
            "e": self.epoch,
            "n": self.nonce,
            "h": host.replace('"', "?").replace("\\", "?"),
            "p": self.process,
            "r": self.run,
            "b": self.beat,
            "d": self.closed,
        }
        return json.dumps(body, separators=(",", ":")).encode()

    @classmethod
    def of(cls, register: Register) -> KeeperRecord:
        """What a register holds. Raises IntegrityError."""
        if register.value is None:
            return cls()
        with parsing("a record of a keeper"):
            body = json.loads(register.value)
            nonce, run, closed = (str(body[name])[:_MARK_CHARACTERS] for name in "nrd")
            return cls(
                epoch=whole(body["e"], "its epoch"),
                nonce=nonce,
                host=str(body["h"])[:_HOST_CHARACTERS],
                process=whole(body["p"], "its process"),
                run=run,
                beat=whole(body["b"], "its beat"),
                closed=closed,
            )

    def renewed(self) -> KeeperRecord:
        """The same, one beat later."""
        return replace(self, beat=self.beat + 1)
