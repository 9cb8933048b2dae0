"""What commands of repair and return say and exit with when something is left to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import hpstore
from hpstore.cli import agent_requests
from hpstore.errors import DeviceMissing, MembershipError
from hpstore.maintenance.rebalance import RebalanceReport
from hpstore.maintenance.rebuild import RebuildReport
from hpstore.pool.admin import PoolAdmin
from tests.integration.cli_cases import Cli

WHOLE = {
    "objects": 1,
    "bytes": 1,
    "seconds": 1.0,
    "healthy": 1,
    "rebuilt": 0,
    "relaid": 0,
    "waiting": 0,
    "stuck": 0,
    "damaged_columns": 0,
    "columns_written": 0,
}


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    made = Cli(tmp_path, capsys)
    made.create(data=2, parity=2, devices=5)
    (tmp_path / "in").write_bytes(b"x" * 300_000)
    made("put", made.pool, "k", "in")
    return made


@pytest.mark.parametrize("command", ["rebuild", "scrub"])
def test_objects_that_wait_for_a_missing_device_are_no_success(
    cli: Cli, tmp_path: Path, command: str
) -> None:
    """Exit code 0 told cron that all was mended."""
    holding = next(path for path in tmp_path.glob("disk*/objects/k") if any(path.iterdir()))
    shutil.move(holding.parents[1], tmp_path / "away")
    cli(command, cli.pool, code=50)
    shutil.move(tmp_path / "away", holding.parents[1])
    cli(command, cli.pool)


def test_a_device_that_could_not_be_listed_is_no_success() -> None:
    """What only it holds was not looked at. What retention soon deletes is put off on purpose."""
    assert not RebuildReport(**WHOLE).unmended  # type: ignore[arg-type]
    assert RebuildReport(**WHOLE, unlisted=("/mnt/b",)).unmended  # type: ignore[arg-type]
    late = RebuildReport(**WHOLE, put_off={"it soon goes": 3})  # type: ignore[arg-type]
    assert not late.unmended
    assert not late.whole


def test_a_rebalance_whose_moves_failed_is_no_success(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It printed them as NOT MOVED, and ended with 0."""
    plain = PoolAdmin.rebalance

    def failing(admin: PoolAdmin, **named: object) -> RebalanceReport:
        report = plain(admin, **named)  # type: ignore[arg-type]
        report.failed["k"] = "no device took it"
        return report

    cli("rebalance", cli.pool)
    monkeypatch.setattr(PoolAdmin, "rebalance", failing)
    cli("rebalance", cli.pool, code=50)


def test_a_readmission_that_the_agent_does_not_hear_is_done_and_says_so(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a host whose agent is not the keeper the pool was changed, and the command then failed
    with "Nothing was changed"."""
    disk = tmp_path / "disk1"
    cli("evict", cli.pool, disk, "--yes")

    def refused(*_: object) -> object:
        raise MembershipError(
            "readmit is for the keeper of the pool, which is b. Nothing was changed; run it there."
        )

    monkeypatch.setattr(agent_requests, "looked_after", lambda _: True)
    monkeypatch.setattr(agent_requests, "order", refused)
    said = json.loads(cli("readmit", cli.pool, disk, "--json"))
    assert (said["state"], said["agent"]) == ("online", "unheard")
    assert "did not take the order: readmit is for the keeper" in cli.err
    assert "Nothing was changed" not in cli.err
    assert cli.json("status", cli.pool)["losses_tolerated"] == 2


def test_a_disk_that_is_not_there_is_not_called_online(cli: Cli, tmp_path: Path) -> None:
    """`hpstore readmit` said so of a member that did not answer; a released disk that was not
    mounted kept its mark. Once it is back, readmit ends the release."""
    disk, away = tmp_path / "disk1", tmp_path / "away"
    with hpstore.open(cli.pool) as pool:
        pool.admin.devices.begin_release(str(disk))
        shutil.move(disk, away)
        with pytest.raises(DeviceMissing, match=r"Nothing was changed\. Mount it"):
            pool.readmit(str(disk))
    said = cli("readmit", cli.pool, disk, code=DeviceMissing.exit_code)
    assert "does not answer" in said
    shutil.move(away, disk)
    assert (disk / "released").exists()
    assert "is online" in cli("readmit", cli.pool, disk)
    assert not (disk / "released").exists()
