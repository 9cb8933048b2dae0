"""Objects of any type, for those who set allow_pickle on both sides. The only use of pickle.

Unpickling runs code that the writer chose: it is refused unless the caller says that the pool is
trusted.
"""

from __future__ import annotations

import pickle
from typing import Any

from hpstore.errors import CheckpointError


# Any: that is what these are for
def dumps(value: Any, path: str) -> bytes:
    """An object as bytes. Raises CheckpointError naming the path."""
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"state {path!r} cannot be pickled: {error}") from error


def loads(data: bytes) -> Any:
    """Inverse of dumps. Call it for trusted data only. Raises CheckpointError."""
    try:
        return pickle.loads(data)
    except Exception as error:
        raise CheckpointError(f"a pickled object cannot be loaded: {error}") from error
