"""What the log says of a save that a process does not wait for to its end."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.checkpoint.save.after_commit import AfterCommits
from hpstore.pool.pool import Pool
from tests.integration.rolled_back import state_of


@pytest.mark.parametrize("committed", [False, True])
def test_a_process_that_ends_does_not_deny_the_step_that_is_committed(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, committed: bool
) -> None:
    """Retention is still at work, or the manifest is on its way and may come to be there."""
    go = threading.Event()
    owner, name = (AfterCommits, "committed") if committed else (Pool, "put")
    plain = getattr(owner, name)

    def late(*args: Any, **options: Any) -> Any:
        if committed or str(args[1]).endswith("step-000000000001/manifest"):
            assert go.wait(60)
        return plain(*args, **options)

    monkeypatch.setattr(owner, name, late)
    with Checkpointer(pool, "run", save=SaveOptions(drain_seconds=0.01)) as ckpt:
        handle = ckpt.save(1, state_of(1.0))
        if committed:
            handle.result(60)
        draining = ckpt.saver._draining
        assert draining is not None
        draining.drain()
        go.set()
        handle.result(60)
        assert ckpt.steps() == [1]
    assert ("step 1 is committed" in caplog.text) == committed
    assert ("save of step 1 has not ended" in caplog.text) != committed
    assert "still current" not in caplog.text
