"""Packages that some sources alone need, each by an extra of hpstore."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hpstore.errors import ConfigError
from hpstore.format.untrusted_bytes import brief


@contextmanager
def needed(what: str, *, extra: str) -> Iterator[None]:
    """Import in this block what a source needs. `what`: such as "LMDB needs lmdb".

    Raises ConfigError, with the extra that brings it, where it cannot be imported.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{what}: pip install 'hpstore[{extra}]' ({brief(error)})") from error
    except RuntimeError as error:  # of a torchvision that was built for another torch
        raise ConfigError(f"{what}, which cannot be imported: {brief(error)}") from error
