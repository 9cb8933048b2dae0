"""A store of small records with compare-and-swap, and what `Registers` keep in one of them.

etcd (etcd_gateway.py) and an object store with conditional writes (s3_records.py) are such stores.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hpstore.agreement.registers import Register
from hpstore.errors import ConfigError
from hpstore.format.records import FORMAT, seal, unseal
from hpstore.format.untrusted_bytes import parsing, whole
from hpstore.runtime.swap_probe import find_lapse

VALUE_BYTES_LIMIT = 1 << 20  # of a record in a store; etcd takes requests of 1.5 MiB
STORED_BYTES_LIMIT = 2 * VALUE_BYTES_LIMIT  # of its envelope, in base64
NONCES_KEPT = 8
_NONCE_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRecord:
    """A record as the store holds it. `revision` is what a swap compares; "" means no record."""

    data: bytes | None = None
    revision: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """What SwapStore.swap() is asked for."""

    name: str
    data: bytes
    revision: str


class SwapStore(Protocol):
    """Linearizable reads and swaps of records by name. Thread-safe.

    `batch`: the most records that one call reads or swaps. `at_once`: calls that make an update of
    all records quick.
    """

    batch: int
    at_once: int

    def read(self, name: str, limit_seconds: float) -> StoredRecord:
        """The record as it is now. Raises RegistersUnavailable."""

    def swap(self, name: str, data: bytes, revision: str, limit_seconds: float) -> bool:
        """Write a record if it is still of this revision ("": if there is none).

        True: it is written, durably. False: it is of another revision, and nothing was written.
        Raises RegistersUnavailable where the store did not answer: it may be written, or be
        written later.
        """

    def read_many(self, names: Sequence[str], limit_seconds: float) -> list[StoredRecord]:
        """Up to `batch` records in their order. Raises RegistersUnavailable."""

    def swap_many(self, swaps: Sequence[Swap], limit_seconds: float) -> bool:
        """Up to `batch` swaps, all or none of them, as swap() has it."""

    def remove(self, name: str, limit_seconds: float) -> None:
        """Remove what a probe has left. Raises RegistersUnavailable."""

    def reachable(self, limit_seconds: float) -> dict[str, str]:
        """Each endpoint, with why it does not answer ("" where it does)."""

    def close(self) -> None:
        """Let connections go. In the child of a fork: without a word to the other side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What a store holds of a register.

    `nonces`: of the last changes, the newest first, so that a writer whose swap was not answered
    finds out what became of it, also when others have changed the record since.
    """

    sequence: int = 0
    value: bytes | None = None
    nonces: tuple[str, ...] = field(default=())

    @property
    def register(self) -> Register:
        """What users of registers see."""
        return Register(order=(0, self.sequence), value=self.value)

    def followed_by(self, value: bytes, nonce: str) -> Envelope:
        """The next one."""
        nonces = (nonce, *self.nonces)[:NONCES_KEPT]
        return Envelope(sequence=self.sequence + 1, value=value, nonces=nonces)

    def encode(self) -> bytes:
        """For the store. Raises ConfigError for a value that no store would take."""
        value = self.value or b""
        if len(value) > VALUE_BYTES_LIMIT:
            raise ConfigError(
                f"a register of {len(value)} bytes: {VALUE_BYTES_LIMIT} at most. Nothing changed."
            )
        body: dict[str, object] = {
            "format": FORMAT,
            "sequence": self.sequence,
            "nonces": list(self.nonces),
            "value": base64.b64encode(value).decode(),
        }
        return seal(body)

    @classmethod
    def decode(cls, data: bytes | None, *, where: str) -> Envelope:
        """Raises IntegrityError, FormatTooNew."""
        if data is None:
            return cls()
        with parsing(where):
            if len(data) > STORED_BYTES_LIMIT:
                raise ValueError(f"{len(data)} bytes, {STORED_BYTES_LIMIT} at most")
            body = unseal(data, where=where)
            nonces, text = body["nonces"], body["value"]
            if not isinstance(nonces, list) or len(nonces) > NONCES_KEPT:
                raise ValueError("its nonces are no list of a few")
            if not all(isinstance(one, str) and len(one) <= 64 for one in nonces):
                raise ValueError("a nonce is no short text")
            value = base64.b64decode(str(text), validate=True)
            if len(value) > VALUE_BYTES_LIMIT:
                raise ValueError(f"a value of {len(value)} bytes")
            return cls(
                sequence=whole(body["sequence"], "its sequence", least=1),
                value=value,
                nonces=tuple(nonces),
            )


def new_nonce() -> str:
    """What names one change of a record."""
    return secrets.token_hex(_NONCE_BYTES)


def probe_swaps(store: SwapStore, limit_seconds: float) -> None:
    """Race swaps of records of its own, to see that the store compares before it writes.

    Of several creates at once one must win, of several swaps of one revision, too, and a swap of a
    revision that is gone must fail. Raises ConfigError where one of these does not hold,
    RegistersUnavailable where the store does not answer.
    """
    lapse = find_lapse(_Trial(store, limit_seconds), f"probe-{new_nonce()}")
    if lapse:
        raise ConfigError(
            f"this store does not enforce conditional writes: {lapse}. Two processes would both "
            "be told that their put was the first. Nothing was changed. Use etcd, or a store that "
            "does."
        )


@dataclass(frozen=True, slots=True)
class _Trial:
    """A SwapTrial: each call within the limit."""

    store: SwapStore
    limit_seconds: float

    def read(self, name: str) -> tuple[bytes | None, str]:
        found = self.store.read(name, self.limit_seconds)
        return found.data, found.revision

    def swap(self, name: str, data: bytes, revision: str) -> bool:
        return self.store.swap(name, data, revision, self.limit_seconds)

    def remove(self, name: str) -> None:
        self.store.remove(name, self.limit_seconds)
