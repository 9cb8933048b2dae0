"""Records as small objects of a store with conditional writes, by obstore.

A swap is one PUT: If-None-Match where there is no record, If-Match with the ETag that was read
otherwise. probe_swaps() makes sure that a store heeds them before a pool relies on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

from hpstore.agreement.register_url import S3Url
from hpstore.agreement.swap_store import STORED_BYTES_LIMIT, StoredRecord, Swap
from hpstore.errors import ConfigError, RegistersUnavailable
from hpstore.format.untrusted_bytes import brief

ATTEMPT_SECONDS = 5.0


class S3Records:
    """A SwapStore. Thread-safe. Credentials are those of the environment."""

    batch = 1  # a store compares one object at a time
    at_once = 64

    def __init__(self, url: S3Url, prefix: str) -> None:
        try:
            import obstore
            from obstore.store import S3Store
        except ImportError as error:
            raise ConfigError(
                "registers in an object store need obstore: pip install hpstore[s3]. Nothing was "
                "changed."
            ) from error
        self._obstore: Any = obstore  # optional: its types are not known everywhere
        self._url, self._prefix = url, f"{url.prefix}/{prefix}/"
        options: dict[str, Any] = {}
        if url.endpoint:
            options["endpoint"] = url.endpoint
        if url.region:
            options["region"] = url.region
        try:
            self._store: Any = S3Store(
                url.bucket,
                client_options={
                    "timeout": timedelta(seconds=ATTEMPT_SECONDS),
                    "connect_timeout": timedelta(seconds=2),
                    "allow_http": url.endpoint.startswith("http://"),
                },
                retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
                **options,
            )
        except (ValueError, TypeError, obstore.exceptions.BaseError) as error:
            raise ConfigError(f"s3://{url.bucket} cannot be used: {brief(error)}") from error

    def read(self, name: str, limit_seconds: float) -> StoredRecord:
        try:
            found = self._obstore.get(self._store, self._prefix + name)
            if found.meta["size"] > STORED_BYTES_LIMIT:
                raise RegistersUnavailable(
                    f"a record of {found.meta['size']} bytes is none of ours."
                )
            revision = found.meta["e_tag"]
            data = bytes(found.bytes())
        except (FileNotFoundError, self._obstore.exceptions.NotFoundError):
            return StoredRecord()
        except (OSError, ValueError, self._obstore.exceptions.BaseError) as error:
            self._fail(error)
        if not revision:
            raise RegistersUnavailable("the store gives no ETag.")
        return StoredRecord(data=data, revision=str(revision))

    def swap(self, name: str, data: bytes, revision: str, limit_seconds: float) -> bool:
        """A conflict of two requests at once (409) counts as unanswered: the store says no more."""
        mode: Any = {"e_tag": revision} if revision else "create"
        failures = self._obstore.exceptions
        try:
            self._obstore.put(
                self._store, self._prefix + name, data, mode=mode, use_multipart=False
            )
        except (failures.AlreadyExistsError, failures.PreconditionError):
            return False
        except (FileNotFoundError, failures.NotFoundError):  # If-Match on a record that is gone
            return False
        except (OSError, ValueError, failures.BaseError) as error:
            self._fail(error)
        return True

    def read_many(self, names: Sequence[str], limit_seconds: float) -> list[StoredRecord]:
        return [self.read(name, limit_seconds) for name in names]

    def swap_many(self, swaps: Sequence[Swap], limit_seconds: float) -> bool:
        return all(self.swap(one.name, one.data, one.revision, limit_seconds) for one in swaps)

    def remove(self, name: str, limit_seconds: float) -> None:
        try:
            self._obstore.delete(self._store, self._prefix + name)
        except (FileNotFoundError, self._obstore.exceptions.NotFoundError):
            return
        except (OSError, ValueError, self._obstore.exceptions.BaseError) as error:
            self._fail(error)

    def reachable(self, limit_seconds: float) -> dict[str, str]:
        where = self._url.endpoint or f"s3://{self._url.bucket}"
        try:
            self.read("probe", limit_seconds)
        except RegistersUnavailable as error:
            return {where: str(error)}
        return {where: ""}

    def close(self) -> None:
        """obstore has one runtime of its own for the whole process."""

    def _fail(self, error: Exception) -> NoReturn:
        raise RegistersUnavailable(
            f"s3://{self._url.bucket} does not answer ({brief(error)})."
        ) from error
