"""Objects with threads and locks that belong to the process that made them."""

from __future__ import annotations

from typing import NoReturn


class OneProcess:
    """Cannot be pickled or copied: says so, where Python would name a lock inside."""

    def __reduce__(self) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(
            f"a {kind} can be neither pickled nor copied: it has threads of this process. "
            f"Make a {kind} in each process, or leave it out of what is copied"
        )
