"""torch in a forked child: its operations get one thread, as those of a DataLoader's worker."""

from __future__ import annotations

import logging
import os

import torch

_log = logging.getLogger(__name__)
_PID = os.getpid()


def calm_torch() -> None:
    """Call before work with tensors. In a child of a fork torch gets one thread, said once.

    The threads of OpenMP do not live in the child, but its first large copy or sum would wait for
    them for ever, or crash. A program that forked before torch has run anything may raise the
    number again afterwards (torch.set_num_threads).
    """
    if os.getpid() != _PID and torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        _log.warning(
            "this process was forked: torch works with one thread here from now on, since those of "
            "its parent do not exist in it. Start processes with spawn or forkserver to have more"
        )
