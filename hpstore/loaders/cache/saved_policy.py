"""What a policy has learned of a source, kept beside the disk tier for the next run."""

from __future__ import annotations

import io
import logging
import os
from pathlib import Path

import numpy as np

from hpstore.errors import MalformedFile
from hpstore.format.numpy_files import npz_arrays
from hpstore.loaders.cache.cache_counters import CacheTally
from hpstore.loaders.cache.disk_tier import DiskPart
from hpstore.loaders.cache.own_files import new_own, own_opener
from hpstore.loaders.cache.policy_interface import Arrays

_log = logging.getLogger(__name__)
_IDENTITY = "hpstore_identity"


def save_learned(part: DiskPart, identity: str, arrays: Arrays, tally: CacheTally) -> None:
    """Replace what is there as a whole. A failure is the disk tier's: counted, not raised."""
    path = f"{part.file.stem}.learned.npz"
    raw = io.BytesIO()
    np.savez(raw, allow_pickle=False, **{_IDENTITY: np.array(identity)}, **dict(arrays))
    try:
        with open(new_own(path + ".new"), "wb") as file:
            file.write(raw.getbuffer())
        os.replace(path + ".new", path)
        tally.add(learned_saved_total=1)
    except OSError as error:
        part.tier.refuse(error)


def load_learned(part: DiskPart, identity: str, tally: CacheTally) -> Arrays | None:
    """What the last run saved for these very blocks; None when there is nothing that can be used.

    Nothing is unpickled. A torn file (zip has checksums) or another identity is as good as none.
    """
    path = f"{part.file.stem}.learned.npz"
    try:
        arrays = npz_arrays(Path(path), opener=own_opener)
    except FileNotFoundError:
        return None
    except MalformedFile as error:
        tally.add(learned_refused_total=1)
        _log.warning("what the cache had learned is not readable (%s): starting afresh", error)
        return None
    if str(arrays.pop(_IDENTITY, "")) != identity:
        tally.add(learned_refused_total=1)
        _log.warning("%s was learned from other data: starting afresh", path)
        return None
    return arrays
