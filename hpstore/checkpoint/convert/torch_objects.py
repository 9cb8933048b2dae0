"""torch.save and torch.load on objects of a pool, by URL: for training loops that use no more."""

from __future__ import annotations

from typing import Any

import torch

from hpstore.checkpoint.convert.torch_files import require_bounded
from hpstore.errors import ConfigError, HpstoreError, IntegrityError
from hpstore.format.untrusted_bytes import brief
from hpstore.interop.filesystem import PoolFileSystem

_SCHEME = "hpstore://"


# Any: whatever torch.save takes
def torch_save(state: Any, url: str, **options: Any) -> None:
    """torch.save(state, path) where the path is an object of a pool.

    Replaces the object as a whole: after an error, or a crash, the one before is there. Durable on
    return. The training waits for all of it; a Checkpointer lets it wait for one copy.

    Parameters
    ----------
    state
        What torch.save takes. It must not change before the return.
    url
        "hpstore://NAME/key": the registered name of a pool, and the object's key.
    options
        Of torch.save.

    Raises
    ------
    ConfigError
        `url` is no such URL, or there is no pool of this name.
    TooFewDevices
        Too few devices took it. The object before is untouched.
    """
    with PoolFileSystem().open(_checked(url), "wb") as stream:
        torch.save(state, stream, **options)


def torch_load(
    url: str,
    map_location: Any = None,
    *,
    weights_only: bool = True,
    **options: Any,
) -> Any:
    """torch.load(path) where the path is an object of a pool, such as torch_save() has put.

    Every byte is verified, and decoded from parity where devices are lost. Files of torch before
    1.6, which are no ZIP archives, are refused, and those that would take far more memory than
    they have bytes.

    Parameters
    ----------
    url
        As for torch_save().
    map_location
        As for torch.load.
    weights_only
        False unpickles any object, which runs code that the writer of the file chose.
    options
        Of torch.load. `mmap` is not possible.

    Raises
    ------
    FileNotFoundError
        There is no such object.
    IntegrityError
        torch.load cannot read it, for what the message says (MalformedFile is one).
    TooManyErasures
        It cannot be read now.
    """
    with PoolFileSystem().open(_checked(url), "rb") as stream:
        require_bounded(stream, url)
        try:
            return torch.load(
                stream, map_location=map_location, weights_only=weights_only, **options
            )
        except (HpstoreError, OSError, MemoryError):
            raise
        except Exception as error:  # torch's and pickle's own, of many classes
            raise IntegrityError(f"{url}: torch.load cannot read it: {brief(error)}") from error


def _checked(url: str) -> str:
    if (
        not isinstance(url, str)
        or not url.startswith(_SCHEME)
        or not url[len(_SCHEME) :].strip("/")
    ):
        raise ConfigError(f"{url!r} is no URL of an object: write {_SCHEME}NAME/key")
    return url
