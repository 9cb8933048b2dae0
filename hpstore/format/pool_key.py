"""The secret key of a pool: what a file must carry to be believed. Pure; docs/decisions/0098.

Keyed BLAKE2b of the standard library.
"""

from __future__ import annotations

import hashlib
import secrets
from enum import StrEnum

from hpstore.errors import ConfigError

KEY_BYTES = 32
MAC_BYTES = 16
TAG_DIGITS = 24  # hex digits of a name's tag: 96 bits
LOST = "lost"


class Use(StrEnum):
    """What a MAC is for: one that is made for one use is nothing for another."""

    KEY_ID = "key id"
    NAME = "name"
    HEADER = "header"
    TABLE = "table"
    SEED = "seed"
    BLOCK = "block"
    RECORD = "record"
    COUNTER = "counter"


_SIZES = {Use.KEY_ID: 8, Use.NAME: TAG_DIGITS // 2, Use.SEED: 8, Use.BLOCK: 8}  # else MAC_BYTES


class PoolKey:
    """32 random bytes, kept in pool.toml alone; or none, where pool.toml gives them up for `lost`.

    Without the bytes nothing can be checked, so nothing is written: a pool whose key is lost is
    opened for reading only, and what is there is believed. Immutable; pickles with its bytes, as a
    pool's settings do with passwords.
    """

    __slots__ = ("_begun", "_secret")

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._begun = (
            {}
            if not secret
            else {
                use: hashlib.blake2b(
                    key=secret, person=use.encode(), digest_size=_SIZES.get(use, MAC_BYTES)
                )
                for use in Use
            }
        )

    @property
    def lost(self) -> bool:
        """Whether pool.toml gives the key up for lost."""
        return not self._secret

    @property
    def text(self) -> str:
        """As it stands in pool.toml. Not to be shown."""
        return self._secret.hex() or LOST

    def hasher(self, use: Use, beginning: bytes = b"") -> hashlib.blake2b:
        """A MAC that is begun, for who adds to it or to copies of it."""
        made = self._begun[use].copy()  # a third of what a new one costs
        made.update(beginning)
        return made

    def mac(self, use: Use, message: bytes | memoryview) -> bytes:
        """The MAC of a message for one use."""
        made = self._begun[use].copy()
        made.update(message)
        return made.digest()

    def fingerprint(self, pool_id: str) -> str:
        """Which key a pool has, for its membership record: with it nobody can make a MAC."""
        return self.mac(Use.KEY_ID, pool_id.encode()).hex()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolKey) and other._secret == self._secret

    def __hash__(self) -> int:
        return hash(self._secret)

    def __repr__(self) -> str:
        return "PoolKey(lost)" if self.lost else "PoolKey(...)"

    def __reduce__(self) -> tuple[object, ...]:
        return (PoolKey, (self._secret,))


def new_pool_key() -> PoolKey:
    """A key for a new pool."""
    return PoolKey(secrets.token_bytes(KEY_BYTES))


def parse_pool_key(text: object, *, where: str) -> PoolKey:
    """A key as it stands in pool.toml. Raises ConfigError, which does not show it."""
    if text == LOST:
        return PoolKey(b"")
    try:
        secret = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        secret = b""
    if len(secret) != KEY_BYTES:
        raise ConfigError(
            f"{where}: key must be {2 * KEY_BYTES} hexadecimal digits, as `hpstore create` wrote "
            f'them, or "{LOST}" to read what is there without any check'
        )
    return PoolKey(secret)
