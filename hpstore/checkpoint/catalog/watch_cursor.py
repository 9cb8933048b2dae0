"""How far an evaluator is, by name, in the pool: it goes on from there after a restart."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from hpstore.checkpoint.format.checkpoint_manifest import checked_step
from hpstore.errors import CheckpointError, ConfigError, ObjectNotFound, VersionConflict
from hpstore.format.keys import Version, check_key
from hpstore.format.records import FORMAT, seal, unseal
from hpstore.format.untrusted_bytes import parsing
from hpstore.pool.pool import Pool

_TRIES = 4  # of a put whose outcome was unclear


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One commit of a step: another save of the same step has another version."""

    step: int
    version: str  # of its manifest, as stat() has it: later ones are greater as text, too


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """What is stored: the last commit that was done, and who has the name."""

    done: Commit | None
    watcher: str

    def encode(self) -> bytes:
        done = self.done
        body = {
            "format": FORMAT,
            "watcher": self.watcher,
            "step": None if done is None else done.step,
            "version": None if done is None else done.version,
        }
        return seal(dict(body))

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> _Record:
        with parsing(where):
            body = unseal(data, where=where)
            watcher, done = str(body["watcher"]), None
            if body["step"] is not None:
                version = str(body["version"])
                Version.parse(f"{version}-{0:08x}")  # what is no version is no place to begin
                done = Commit(step=checked_step(int(str(body["step"]))), version=version)
            return cls(done=done, watcher=watcher)


def cursor_key(prefix: str, name: str) -> str:
    """Where the cursor of this name is. Raises ConfigError."""
    if not isinstance(name, str) or not name or "/" in name:
        raise ConfigError(f"cursor={name!r} is not a name: it must not be empty or hold a slash")
    return check_key(f"{prefix}/watchers/{name}")


class WatchCursor:
    """The cursor of one name. Who began to watch with it last has it: an older process that still
    watches with it fails when it would move it, so no step is passed over for both of them.

    Taken when it is made: `done` is the last commit that was done before. Raises what
    the pool raises. One thread at a time.
    """

    def __init__(self, pool: Pool, prefix: str, name: str) -> None:
        self._pool, self._key, self._name = pool, cursor_key(prefix, name), name
        self._watcher, self._version = secrets.token_hex(8), ""
        for _ in range(_TRIES):
            self.done = self._load()
            try:
                self._put(self.done)
            except VersionConflict:
                continue  # another process took it at the same moment
            return
        raise CheckpointError(
            f"the cursor {name!r} could not be taken: other processes take it again and again. "
            "Nothing was changed. Give each evaluator a cursor of its own."
        )

    def move(self, done: Commit) -> None:
        """Note that a commit is done. Durable on return.

        Raises CheckpointError when another process watches with this cursor by now.
        """
        for _ in range(_TRIES):
            try:
                self._put(done)
            except VersionConflict:
                if not self._is_mine():
                    raise CheckpointError(
                        f"another process has begun to watch with the cursor {self._name!r}; this "
                        f"one ends after step {done.step}. The other goes on with the steps that "
                        "were not noted as done. Give each evaluator a cursor of its own."
                    ) from None
            else:
                return
        raise CheckpointError(f"the cursor {self._name!r} could not be moved to step {done.step}")

    def _put(self, done: Commit | None) -> None:
        data = _Record(done=done, watcher=self._watcher).encode()
        before = self._version or None
        self._version = self._pool.put(
            self._key, data, if_absent=before is None, if_version=before
        ).version

    def _load(self) -> Commit | None:
        """What the pool has, and of which version it is."""
        try:
            self._version = self._pool.stat(self._key).version
            return _Record.decode(self._pool.get(self._key), where=self._key).done
        except ObjectNotFound:
            self._version = ""
            return None

    def _is_mine(self) -> bool:
        """Whether a put of this process that seemed to fail is what is there."""
        try:
            self._version = self._pool.stat(self._key).version
            found = _Record.decode(self._pool.get(self._key), where=self._key)
        except ObjectNotFound:
            self._version = ""
            return True  # it was deleted: it begins again
        return found.watcher == self._watcher
