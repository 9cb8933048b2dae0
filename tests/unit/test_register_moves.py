"""Registers that move while processes use them, and such as are lost (PROTOCOL 6, 14, 15)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from hpstore.agreement import swap_registers
from hpstore.agreement.claims import ClaimLost
from hpstore.agreement.registers import key_register
from hpstore.agreement.swap_registers import SwapRegisters
from hpstore.errors import (
    ConfigError,
    FormatTooNew,
    MembershipError,
    RegistersForeign,
    RegistersUnavailable,
    VersionConflict,
)
from hpstore.format.records import FORMAT, NEWEST_FORMAT, POOL_FILE, RegisterPlace, unseal
from hpstore.membership import members, register_moves
from hpstore.membership import outside_registers as outside
from hpstore.objects.context import PoolContext
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import FakeClock, Harness
from hpstore.testing.memory_swaps import MemoryRecords, MemorySwaps
from tests.register_servers import s3_or_skip

URL = "etcd://a:2379,b:2379,c:2379/pools"
HOUR_MS = 3_600_000


class Etcd:
    """What the processes of a test take for etcd."""

    def __init__(self) -> None:
        self.shared, self.down = MemoryRecords(), False

    def fault(self, operation: str) -> str:
        return "down" if self.down else ""

    def store(self, store: PoolContext, place: RegisterPlace) -> MemorySwaps:
        return MemorySwaps(self.shared, self.fault, f"{place.epoch}/")


@pytest.fixture
def etcd(monkeypatch: pytest.MonkeyPatch) -> Etcd:
    made = Etcd()
    monkeypatch.setattr(outside, "swap_store", made.store)
    return made


@pytest.fixture(autouse=True)
def _few_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 instead of 4,096: a move is over sooner."""
    monkeypatch.setattr("hpstore.agreement.registers.BUCKETS", 64)


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path, data=2, parity=1, devices=4, clock=FakeClock(), keyed=True)


def test_a_pool_grows_to_etcd_while_processes_use_it_rule_15(harness: Harness, etcd: Etcd) -> None:
    """What one has opened before goes on with what it finds; so it does on the way back."""
    with harness.open() as a, harness.open() as b:
        first = a.put("k", b"a", if_absent=True).version
        report = a.admin.move_registers(URL)
        assert (report.url, report.kind, report.problem) == (URL, "outside", "")
        with pytest.raises(VersionConflict):
            b.put("k", b"b", if_absent=True)
        second = b.put("k", b"b", if_version=first).version
        assert b.admin.registers_report().kind == "outside"
        before = etcd.shared.revision
        a.put("other", b"a", if_absent=True)
        assert etcd.shared.revision > before
        b.evict("memory://d3")
        b.add_device("memory://e0")
        assert a.admin.move_registers("devices").kind == "devices"
        before = etcd.shared.revision
        with pytest.raises(VersionConflict):
            b.put("k", b"c", if_version=first)
        b.put("k", b"c", if_version=second)
        assert etcd.shared.revision == before
    with harness.open() as pool:
        assert pool.get("k") == b"c"


def test_registers_that_never_moved_do_not_move_to_where_they_are(harness: Harness) -> None:
    """Nothing is written."""
    with harness.open() as pool:
        generation = pool.admin.record.generation
        with pytest.raises(ConfigError, match="on its devices already"):
            pool.admin.move_registers("devices")
        assert pool.admin.record.generation == generation


def test_a_claim_that_is_held_moves_along_and_is_given_back_there_rule_6(
    harness: Harness, etcd: Etcd
) -> None:
    """A conditional put has written everything when the registers move under it."""
    with harness.open() as a, harness.open() as b:
        claim = a._session.claims.take("k")
        counter = claim.next_counter(0)
        b.admin.move_registers(URL)
        claim.give_back()
        assert b._session.claims.take("k").next_counter(0) > counter


def gone_after(etcd: Etcd, monkeypatch: pytest.MonkeyPatch, place: object, name: str) -> None:
    """The first swap within a call is made, not answered, and etcd is away from then on."""
    plain, begun = getattr(place, name), list[str]()

    def fault(operation: str) -> str:
        if etcd.down or not begun:
            return "down" if etcd.down else ""
        etcd.down = operation == "swap"
        return "lost" if etcd.down else ""

    def watched(*arguments: object) -> object:
        begun.append(name)
        return plain(*arguments)

    monkeypatch.setattr(etcd, "fault", fault)
    monkeypatch.setattr(place, name, watched)


def test_a_move_that_its_old_place_leaves_says_that_it_is_half_way_rule_15(
    harness: Harness, etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records are marked, and conditional puts wait: that nothing was changed would be wrong."""
    with harness.open() as a:
        a.admin.move_registers(URL)
    with monkeypatch.context() as patch, harness.open() as b:
        gone_after(etcd, patch, register_moves, "_mark_all")
        with pytest.raises(MembershipError, match="half-way to devices") as said:
            b.admin.move_registers("devices")
        assert "Nothing was changed" not in str(said.value)
    etcd.down = False
    with harness.open() as c:
        with pytest.raises(RegistersUnavailable, match="being moved"):
            c.put("k", b"x", if_absent=True)
        c.admin.move_registers("devices")
        c.put("k", b"x", if_absent=True)


def test_a_device_that_may_be_a_member_by_the_registers_stays_one_rule_14(
    harness: Harness, etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to the swap of the membership is lost: what counts names the new device, so its
    identity is not taken back."""
    with harness.open() as a:
        a.admin.move_registers(URL)
    with monkeypatch.context() as patch, harness.open() as b:
        gone_after(etcd, patch, swap_registers._RecordExchange, "settle")
        with pytest.raises(MembershipError, match="may count or not") as said:
            b.add_device("memory://e0")
        assert "Nothing was changed" not in str(said.value)
    etcd.down = False
    with harness.open() as c:
        added = c.add_device("memory://e0")
        assert c.admin.record.member(added) is not None
        assert added in c.admin.devices.places
        assert len(c.admin.record.members) == 5


def test_who_reads_the_old_place_gets_no_claim_there_rule_6(
    harness: Harness, etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was stopped before it took a claim goes on after the move, with the membership
    of before: its record is marked for another place, so it looks."""
    with harness.open() as a, harness.open() as b:
        old = a.admin.registers.engine()
        b.admin.move_registers(URL)
        assert a.admin.record.registers is None
        plain, asked = a.admin.registers.engine, [0]

        def engine(*arguments: object) -> object:
            asked[0] += 1
            return old if asked[0] == 1 else plain(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(a.admin.registers, "engine", engine)
        before = etcd.shared.revision
        claim = a._session.claims.take("k")
        assert claim.held
        assert asked[0] > 1
        assert etcd.shared.revision > before


@pytest.mark.parametrize("fails", ["update_all", "seed", "commit"])
def test_a_move_that_is_cut_short_is_run_again_and_nothing_is_acknowledged_twice_rule_15(
    harness: Harness, etcd: Etcd, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Conditional puts wait and say why, all else goes on; another place will do, too."""
    with harness.open() as a, harness.open() as b:
        first = b.put("k", b"b", if_absent=True).version

        def die(*_: object, **__: object) -> None:
            raise RegistersUnavailable("the process died.")

        with monkeypatch.context() as broken:
            if fails == "update_all":
                _cut_marks(broken, a)
            elif fails == "seed":
                broken.setattr(register_moves, "_seed", die)
            else:
                broken.setattr(register_moves, "commit_record", die)
            with pytest.raises((MembershipError, RegistersUnavailable)):
                a.admin.move_registers(URL)
        with pytest.raises(RegistersUnavailable, match=r"are being moved.*run it again"):
            b.put("k", b"c", if_version=first)
        b.put("plain", b"x")
        assert b.get("k") == b"b"
        a.admin.move_registers("devices" if fails == "commit" else URL)
        with pytest.raises(VersionConflict):
            b.put("k", b"c", if_absent=True)
        b.put("k", b"c", if_version=first)


def _cut_marks(broken: pytest.MonkeyPatch, pool: Pool) -> None:
    """A move dies when it has marked some of the records."""
    engine = pool.admin.registers.engine()

    def some(change: Callable[..., bytes], *, what: str) -> None:
        for name in (key_register("k"), key_register("other")):
            engine.update(name, lambda register, name=name: change(name, register), what=what)  # type: ignore[misc]
        raise RegistersUnavailable("the process died.")

    broken.setattr(engine, "update_all", some)


def test_two_moves_at_once_have_one_winner_rule_14(
    harness: Harness, etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first was stopped before it committed, and its hold is gone."""
    with harness.open() as a, harness.open() as b:
        plain = members.commit_record

        def stopped(*arguments: object, **options: object) -> None:
            monkeypatch.setattr(register_moves, "commit_record", plain)
            for device in harness.devices.values():
                device.restart()  # all holds are gone
            b.admin.move_registers(URL + "/b")
            plain(*arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(register_moves, "commit_record", stopped)
        with pytest.raises(MembershipError):
            a.admin.move_registers(URL)
        a.put("k", b"a", if_absent=True)
        with pytest.raises(VersionConflict):
            b.put("k", b"b", if_absent=True)
        assert a.admin.registers_report().url == URL + "/b"


def test_etcd_that_is_down_is_in_the_way_of_conditional_puts_and_changes_alone_rule_15(
    harness: Harness, etcd: Etcd
) -> None:
    """Reading, plain puts, deletes, lists, rebuilds, and opening the pool go on."""
    with harness.open() as pool:
        pool.admin.move_registers(URL)
        pool.put("k", bytes(300_000), if_absent=True)
        etcd.down = True
        calls: tuple[Callable[[], object], ...] = (
            lambda: pool.put("new", b"x", if_absent=True),
            lambda: pool.put("k", b"x", if_version=pool.stat("k").version),
        )
        for call in calls:
            with pytest.raises(RegistersUnavailable, match=r"Nothing was changed.*plain puts"):
                call()
        with pytest.raises(MembershipError, match="does not answer"):
            pool.evict("memory://d3")
        assert "does not answer" in pool.admin.registers_report().problem
    harness.lose(["memory://d0"])
    with harness.open() as pool:
        assert pool.get("k") == bytes(300_000)
        pool.put("plain", b"x")
        pool.delete("k")
        assert list(pool.list()) == ["plain"]
        harness.bring_back()
        pool.admin.refresh()
        assert pool.rebuild().healthy
        assert pool.scrub().objects == 1
        etcd.down = False
        pool.put("new", b"x", if_absent=True)


def test_a_process_that_cannot_use_the_registers_reads_and_puts(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, etcd: Etcd
) -> None:
    """Its machine lacks obstore, or a certificate: that is said at each conditional put."""
    with harness.open() as pool:
        pool.admin.move_registers(URL)

    def lacks(*_: object) -> SwapRegisters:
        raise ConfigError("no certificate.")

    monkeypatch.setattr(outside, "swap_store", lacks)
    with harness.open() as pool:
        pool.put("plain", b"x")
        assert pool.get("plain") == b"x"
        with pytest.raises(RegistersForeign, match="no certificate"):
            pool.put("k", b"x", if_absent=True)
        assert "no certificate" in pool.admin.registers_report().problem


def test_lost_registers_are_made_again_above_all_counters_and_only_when_they_are_lost_rule_15(
    harness: Harness, etcd: Etcd
) -> None:
    """A new etcd has none of the records; who was stopped with a claim of before, and a clock that
    is hours ahead, is below."""
    with harness.open() as a, harness.open() as b:
        a.admin.move_registers(URL)
        first = a.put("k", b"a", if_absent=True).version
        claim = a._session.claims.take("k")
        late = claim.next_counter(harness.clock.wall_ms() + 20 * HOUR_MS)
        with pytest.raises(MembershipError, match=r"answer, and have .* Nothing was changed"):
            b.admin.reset_registers()
        etcd.shared.records.clear()
        for call in (
            lambda: b.put("k", b"b", if_version=first),
            lambda: b.evict("memory://d3"),
        ):
            with pytest.raises(RegistersForeign, match="data was lost"):
                call()
        assert b.get("k") == b"a"
        assert b.admin.reset_registers().problem == ""
        second = b.put("k", b"b", if_version=first)
        assert int(second.version.split("-")[0], 16) > late
        with pytest.raises(ClaimLost):
            claim.give_back()
        b.evict("memory://d3")
        a.put("k", b"c", if_version=second.version)


def test_reset_can_go_elsewhere_and_back_to_the_devices_rule_15(
    harness: Harness, etcd: Etcd
) -> None:
    """etcd is gone for good."""
    with harness.open() as pool:
        pool.admin.move_registers(URL)
        version = pool.put("k", b"a", if_absent=True).version
        etcd.down = True
        assert pool.admin.reset_registers("devices").kind == "devices"
        pool.put("k", b"b", if_version=version)
        etcd.down = False
        assert pool.admin.move_registers(URL + "/2").kind == "outside"
        pool.put("k2", b"b", if_absent=True)


def test_a_change_whose_process_died_after_it_counted_is_brought_to_the_devices_rule_14(
    harness: Harness, etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the registers, on no device yet: the next change follows it."""
    with harness.open() as a, harness.open() as b:
        a.admin.move_registers(URL)
        a.put("k", bytes(300_000))

        def die(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as broken:
            broken.setattr("hpstore.membership.members._write_record", die)
            with pytest.raises(KeyboardInterrupt):
                a.evict("memory://d3")
        b.evict("memory://d2")
        states = {m.url: m.state for m in b.admin.record.members}
        assert states["memory://d3"] == "draining"
        assert [m.url for m in b.admin.record.evicted] == ["memory://d2"]


def test_a_record_with_a_place_of_registers_is_of_a_format_that_older_ones_refuse(
    harness: Harness, etcd: Etcd
) -> None:
    """And it comes back as it is; one that never moved keeps its format."""
    device = harness.devices["memory://d0"]
    with harness.open() as pool:
        old = unseal(device.read_small(POOL_FILE, 1 << 20), where="x", newest=NEWEST_FORMAT)
        pool.admin.move_registers(URL)
        new = unseal(device.read_small(POOL_FILE, 1 << 20), where="x", newest=NEWEST_FORMAT)
        assert old["format"] == NEWEST_FORMAT - 1 > FORMAT
        assert new["format"] == NEWEST_FORMAT
        place = pool.admin.record.registers
        assert place is not None
        assert new["registers"] == {"url": URL, "epoch": place.epoch}
        with pytest.raises(FormatTooNew):
            unseal(device.read_small(POOL_FILE, 1 << 20), where="x", newest=NEWEST_FORMAT - 1)
    for bad in ({"url": URL}, {"url": URL, "epoch": "x"}, {"url": "x" * 4000, "epoch": "0" * 16}):
        with pytest.raises((ValueError, KeyError)):
            RegisterPlace.of(bad)


@pytest.mark.parametrize(
    "url",
    [
        "etcd://",
        "etcd://a:b",
        "etcd://a:0",
        "etcd://a,a",
        "etcd://user:secret@a",
        "etcd://a/../b",
        "etcd://a?x=1",
        "etcd://" + ",".join(f"h{n}" for n in itertools.islice(itertools.count(), 16)),
        "http://a",
        "s3://",
        "s3://bucket/p?key=secret",
        "s3://bucket/p?endpoint=ftp://a",
        "s3://bucket/p?endpoint=http://u:p@a",
        "x" * 3000,
        "etcd://[::1",
    ],
)
def test_a_url_that_names_no_registers_is_refused_before_anything_is_done(
    harness: Harness, url: str
) -> None:
    """With the forms that are known."""
    with harness.open() as pool, pytest.raises(ConfigError, match=r"Use devices, etcd://HOST"):
        pool.admin.move_registers(url)


@pytest.mark.parametrize("enforces", [True, False])
def test_a_pool_agrees_through_a_server_of_s3_that_enforces_conditions_and_no_other(
    harness: Harness, *, enforces: bool
) -> None:
    """moto's; without conditions it is refused before anything is changed."""
    with (
        s3_or_skip(enforces=enforces) as url,
        harness.open() as a,
        harness.open() as b,
    ):
        if not enforces:
            generation = a.admin.record.generation
            with pytest.raises(ConfigError, match="does not enforce conditional writes"):
                a.admin.move_registers(url)
            assert a.admin.record.generation == generation
            b.put("k", b"b", if_absent=True)
            return
        report = a.admin.move_registers(url)
        assert (report.kind, report.problem) == ("outside", "")
        first = a.put("k", b"a", if_absent=True).version
        with pytest.raises(VersionConflict):
            b.put("k", b"b", if_absent=True)
        b.put("k", b"b", if_version=first)
        b.evict("memory://d3")
        a.admin.move_registers("devices")
        with pytest.raises(VersionConflict):
            b.put("k", b"c", if_version=first)
