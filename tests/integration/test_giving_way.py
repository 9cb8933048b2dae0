"""Who holds a pool for long, who waits for it, and what both are told."""

from __future__ import annotations

import http.client
import io
import logging
import os
import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from hpstore.agent.http_server import StatusServer
from hpstore.agreement.registers import REPAIR
from hpstore.config import private_directory
from hpstore.errors import LockTimeout
from hpstore.locks import file_lock
from hpstore.testing.memory_pool import FakeClock, Harness


class BusyClock(FakeClock):
    """While somebody waits, others work."""

    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    def wait(self, seconds: float) -> None:
        super().wait(seconds)
        self.meanwhile()


@pytest.mark.parametrize("command", ["scrub", "rebuild", "rebalance"])
def test_an_operator_who_waits_is_seen_and_comes_next(tmp_path: Path, command: str) -> None:
    """By the holder, which gives way."""
    clock = BusyClock()
    harness = Harness(tmp_path, data=2, parity=1, devices=4, clock=clock)
    with harness.open() as holder, harness.open() as operator, ExitStack() as held:
        held.enter_context(holder.admin.registers.hold(REPAIR, "the agent's scrub"))
        assert not holder.admin.repair_wanted()

        def look() -> None:
            if holder.admin.repair_wanted():
                held.close()

        clock.meanwhile = look
        getattr(operator.admin, command)()
        assert clock.elapsed < operator.config.settings.lock_deadline_seconds
        assert not holder.admin.repair_wanted()


def test_a_pass_that_gives_way_lets_others_first(tmp_path: Path) -> None:
    """Else it would be back before who waits looks again."""
    harness = Harness(tmp_path, data=2, parity=1, devices=4, clock=FakeClock())
    with harness.open() as agent, harness.open() as operator:
        with (
            operator.admin.registers.hold("waiting", "rebuild"),
            pytest.raises(LockTimeout, match="goes first"),
        ):
            agent.admin.scrub(gives_way=True)
        assert agent.admin.scrub(gives_way=True).clean


def test_a_lock_file_says_who_holds_it(tmp_path: Path) -> None:
    """As locks on devices do: a pool on stores named the file alone."""
    directory, clock = private_directory(tmp_path / "run"), FakeClock()
    with (
        file_lock(directory, "repair.lock", clock, 1.0, "the agent's scrub"),
        pytest.raises(LockTimeout, match=rf"process {os.getpid()} \(the agent's scrub\) holds"),
        file_lock(directory, "repair.lock", clock, 1.0, "rebuild"),
    ):
        pass


def test_a_scrape_that_goes_away_leaves_no_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It left 20 lines in the agent's log, each time."""
    errors = io.StringIO()
    monkeypatch.setattr("sys.stderr", errors)
    with StatusServer("127.0.0.1:0") as server, caplog.at_level(logging.INFO):
        host, _, port = server.url.removeprefix("http://").partition(":")
        for _ in range(5):
            gone = socket.create_connection((host, int(port)))
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            gone.sendall(b"GET / HTTP/1.1\r\n")
            gone.close()  # a reset, in the middle of a request
        asked = http.client.HTTPConnection(host, int(port), timeout=60)
        asked.request("GET", "/metrics")
        assert asked.getresponse().status == 200
        asked.close()
    assert "Traceback" not in errors.getvalue()
    assert not caplog.records
