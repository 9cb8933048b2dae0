"""torch in a forked child: its operations get one thread, as those of a DataLoader's worker."""

from __future__ import annotations

import logging
import os
from multiprocessing.forkserver import get_inherited_fds

import torch

_log = logging.getLogger(__name__)


class _Forks:
    """Forks between the process that imported this and the one that asks."""

    def __init__(self) -> None:
        self.count = 0
        self._in_server = get_inherited_fds() is None  # or in a process without a server
        os.register_at_fork(after_in_child=self._another)

    def _another(self) -> None:
        self.count += 1

    def lost_threads(self) -> bool:
        """Whether this process was forked, and not by a fork server that had imported this: a
        server runs nothing, so torch has no threads in it."""
        by_server = self._in_server and get_inherited_fds() is not None
        return self.count > (1 if by_server else 0)


_forks = _Forks()


def calm_torch() -> None:
    """Call before work with tensors. In a child of a fork torch gets one thread, said once.

    The threads of OpenMP do not live in the child, but its first large copy or sum would wait for
    them for ever, or crash. A program that forked before torch has run anything may raise the
    number again afterwards (torch.set_num_threads).
    """
    if _forks.lost_threads() and torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        _log.warning(
            "this process was forked: torch works with one thread here from now on, since those of "
            "its parent do not exist in it. Start processes with spawn or forkserver to have more"
        )
