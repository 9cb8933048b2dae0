"""The writer processes of several ranks, as their trainers see them (docs/decisions/0123)."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpstore import errors
from hpstore.checkpoint.ranks.collectives import RankChannel, Ranks
from hpstore.checkpoint.ranks.writer_ranks import StoreAddress
from hpstore.checkpoint.save.save_handle import SaveReport
from hpstore.checkpoint.save.writer_client import WriterClient, WriterGone
from hpstore.checkpoint.save.writer_process import JoinRanks, OpenStore, RanksJoined, StoreOpened
from hpstore.errors import CheckpointError, HpstoreError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """What a rank says to the others. `gone`: its writer is, or has lost another one."""

    name: str
    error: str = ""
    kind: str = ""
    gone: bool = False
    report: dict[str, Any] | None = None  # Any: JSON


class WriterGroup:
    """One writer a rank. gather() and agree() are calls of all ranks, in the background of a save:
    what fails on one rank fails on all, with one error.

    Trainers speak before and after a save alone. In between the writers vote among themselves.
    """

    def __init__(self, writer: WriterClient, ranks: Ranks) -> None:
        self._writer, self._ranks = writer, ranks
        # longer than writers wait for each other, shorter than trainers wait after that
        writer.answer_seconds = ranks.timeout_seconds * 1.5
        self._joined: Sequence[str] = ()  # names of the writers that have found each other

    def gather(self) -> None:
        """Let every rank have a writer, and these find each other where one is new. Raises
        HpstoreError on all ranks."""
        problem: BaseException | None = None
        try:
            self._writer.ready()
        except BaseException as error:  # noqa: BLE001 (raised below, on all ranks)
            problem = error
        heard = self.agree(problem)
        if [said.name for said in heard] != self._joined:
            self._joined = ()
            self._join()

    def _join(self) -> None:
        address = json.loads(self._ranks.broadcast(self._opened(), RankChannel.SAVER))
        problem: BaseException | None = None
        try:
            if "error" in address:
                raise CheckpointError(f"rank 0: {address['error']}")
            if not self._ranks.leads:
                self._writer.renew()
            order = JoinRanks(
                address=StoreAddress(**address),
                rank=self._ranks.rank,
                world=self._ranks.world,
                commit_seconds=self._ranks.timeout_seconds,
            )
            self._writer.ask(order, RanksJoined)
        except BaseException as error:  # noqa: BLE001 (raised below, on all ranks)
            problem = error
        try:
            heard = self.agree(problem)
        except BaseException:
            self._writer.parted = True  # who has found some of the others has to begin again
            raise
        self._joined = [said.name for said in heard]

    def _opened(self) -> bytes:
        """The address of rank 0's store, of a writer that has not joined others before."""
        if not self._ranks.leads:
            return b""
        try:
            self._writer.renew()
            order = OpenStore(timeout_seconds=self._ranks.timeout_seconds)
            found = self._writer.ask(order, StoreOpened).address
        except Exception as error:  # noqa: BLE001 (raised on all ranks)
            return json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()
        body = {"hosts": list(found.hosts), "port": found.port, "boot": found.boot}
        return json.dumps(body).encode()

    def agree(self, problem: BaseException | None) -> Sequence[_Said]:
        """What all ranks say when none has a problem. Raises one error on all of them."""
        heard = self._exchanged(problem, None)
        self._raise_first(heard, problem)
        return heard

    def outcome(self, report: SaveReport | None, problem: BaseException | None) -> SaveReport:
        """What became of a save: committed on all ranks when any writer knows that it is, as those
        of others may have died before they heard of it. Raises one error on all of them."""
        try:
            heard = self._exchanged(problem, report)
        except CheckpointError:
            if report is not None:
                return report  # it is durable, whoever has died since
            if problem is not None:
                raise problem  # noqa: B904 (says more than that a rank is gone, too)
            raise
        for said in heard:
            if said.report is not None:
                if problem is not None and not isinstance(problem, Exception):
                    raise problem
                return report or SaveReport(**said.report)
        self._raise_first(heard, problem)
        raise CheckpointError("a save has ended on no rank")

    def _exchanged(
        self, problem: BaseException | None, report: SaveReport | None
    ) -> Sequence[_Said]:
        writer = self._writer
        gone = writer.parted or isinstance(problem, WriterGone)
        gone = gone or (problem is not None and not isinstance(problem, Exception))
        mine: dict[str, Any] = {"name": writer.name, "gone": gone}
        if problem is not None:
            known = isinstance(problem, HpstoreError)
            kind = type(problem).__name__
            mine |= {"error": str(problem) if known else f"{kind}: {problem}", "kind": kind}
        if report is not None:
            mine["report"] = report.as_dict()
        messages = self._ranks.all_gather(json.dumps(mine).encode(), RankChannel.SAVER)
        heard = [_Said(**json.loads(said)) for said in messages]
        if any(said.gone for said in heard):  # what is left of them votes no more
            writer.parted = True
            self._joined = ()
        return heard

    def _raise_first(self, heard: Sequence[_Said], problem: BaseException | None) -> None:
        """Raise what the first rank with a problem has met: one class and text on all ranks."""
        if problem is not None and not isinstance(problem, Exception):
            raise problem
        for rank, said in enumerate(heard):
            if said.kind:
                if any(other.gone for other in heard):
                    raise WriterGone(f"a writer process is gone: {said.error}") from problem
                kind = getattr(errors, said.kind, CheckpointError)
                text = said.error if rank == 0 else f"rank {rank}: {said.error}"
                raise kind(text) from problem
