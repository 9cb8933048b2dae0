"""An operator's words to the agent of this node: a small file that commands write and it reads.

Orders are numbered. The agent obeys each once, in their order, and says in its status what became
of it. Then they leave the file, so that an agent whose memory was moved away does not obey them
again. Without an agent they wait for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpstore.agent.saved_state import load_memory
from hpstore.errors import IntegrityError
from hpstore.format.records import FORMAT, seal, unseal
from hpstore.format.untrusted_bytes import MALFORMED, brief
from hpstore.health.policy.operator_commands import Command
from hpstore.locks import file_lock
from hpstore.runtime.clock import Clock
from hpstore.runtime.text_files import write_atomically

ORDERS_FILE = "orders.json"
_KEPT = 256
_DEADLINE_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRequest:
    """One of them. `device` is an id."""

    number: int
    at_ms: int
    word: Command
    device: str


def read_orders(directory: Path) -> list[OperatorRequest]:
    """All that are kept, oldest first. Raises IntegrityError."""
    return _read(directory)[0]


def _read(directory: Path) -> tuple[list[OperatorRequest], int]:
    """The orders that are kept, and the highest number that has left the file."""
    path = directory / ORDERS_FILE
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    body = unseal(data, where=str(path))
    rows = body.get("orders")
    try:
        if not isinstance(rows, list):
            raise ValueError("orders is not a list")
        settled = int(str(body.get("settled", 0)))  # files of before have none
        found = [
            OperatorRequest(
                number=int(row["number"]),
                at_ms=int(row["at_ms"]),
                word=Command(row["word"]),
                device=str(row["device"]),
            )
            for row in rows
        ]
        return found, settled
    except MALFORMED as error:
        raise IntegrityError(f"{path}: orders are malformed: {brief(error)}") from error


def give_order(directory: Path, word: Command, device: str, clock: Clock) -> OperatorRequest:
    """Add an order. Durable on return. Raises LockTimeout, IntegrityError, ConfigError."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    with file_lock(directory, "orders.lock", clock, _DEADLINE_SECONDS, "order"):
        known, settled = _read(directory)
        # also where the file was moved away: a number that was obeyed once is never obeyed again
        last = known[-1].number if known else 0
        number = 1 + max(load_memory(directory).orders_done, settled, last)
        order = OperatorRequest(number=number, at_ms=clock.wall_ms(), word=word, device=device)
        _write(directory, [*known, order][-_KEPT:], settled)
    return order


def settle_orders(directory: Path, done: int, clock: Clock) -> None:
    """Take orders that were obeyed, those up to a number, out of the file. Durable on return.

    Parameters
    ----------
    directory
        Where the agent keeps its memory.
    done
        Number of the last order that was obeyed and remembered.
    clock
        The pool's.

    Raises
    ------
    LockTimeout, IntegrityError, OSError
        The orders are in the file as before.
    """
    with file_lock(directory, "orders.lock", clock, _DEADLINE_SECONDS, "orders"):
        known, settled = _read(directory)
        _write(directory, [o for o in known if o.number > done], max(settled, done))


def _write(directory: Path, orders: Sequence[OperatorRequest], settled: int) -> None:
    rows = [
        {"number": o.number, "at_ms": o.at_ms, "word": o.word, "device": o.device} for o in orders
    ]
    text = seal({"format": FORMAT, "orders": rows, "settled": settled}).decode()
    write_atomically(directory / ORDERS_FILE, text)
