"""How writer processes of other hosts reach the store of rank 0's: by the names of its host."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from hpstore.checkpoint.catalog.writer_fence import here
from hpstore.checkpoint.ranks import writer_ranks
from hpstore.checkpoint.ranks.collectives import RankChannel
from hpstore.checkpoint.ranks.writer_ranks import StoreAddress, join_writers, open_store
from hpstore.errors import CheckpointError
from tests.integration.rank_server import Call, rank_server

ELSEWHERE = "127.0.0.2"  # an address of this host that a store bound to 127.0.0.1 has not
PATIENCE = 100.0


def closed_port() -> int:
    """Where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@pytest.mark.parametrize(
    ("said", "first"),
    [
        ({"MASTER_ADDR": "node-1.example", "RANK": "0"}, ["node-1.example"]),
        ({"MASTER_ADDR": "node-1.example", "RANK": "3"}, []),  # of another host: not ours
        ({"MASTER_ADDR": "node-1.example"}, []),
        ({"MASTER_ADDR": "", "RANK": "0"}, []),
        ({}, []),
    ],
)
def test_an_address_has_the_name_that_other_ranks_were_given(
    monkeypatch: pytest.MonkeyPatch, said: dict[str, str], first: list[str]
) -> None:
    for name in ("MASTER_ADDR", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    found = StoreAddress.of_this_host(7)
    assert list(found.hosts) == [*first, socket.gethostname()]
    assert (found.port, found.boot) == (7, here()[1])


def test_the_loopback_is_for_the_same_boot_alone() -> None:
    """Another host has a loopback, too, where a store of another job may listen."""
    hosts = ["node-1", "node-1.example", "node-1"]
    assert StoreAddress(hosts=hosts, port=1, boot=here()[1]).to_try() == ["127.0.0.1", *hosts[:2]]
    for boot in ("another", ""):
        assert StoreAddress(hosts=hosts, port=1, boot=boot).to_try() == hosts[:2]


def test_the_store_answers_on_every_address_of_its_host() -> None:
    """It is made with 127.0.0.1, where rank 0 itself connects to it."""
    store = open_store(10.0)
    store.set("who", "rank 0")
    other = writer_ranks._connected(
        StoreAddress(hosts=[ELSEWHERE], port=store.port, boot="another"), timedelta(seconds=10)
    )
    assert other.get("who") == b"rank 0"


def join(rank: int, directory: Path, hosts: Sequence[str]) -> None:
    """A writer of two. That of rank 1 is of another boot, and goes by names."""
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = open_store(PATIENCE) if rank == 0 else None
        if store is not None:
            (directory / "fifo").write_text(str(store.port))  # waits until rank 1 reads it
        port = int((directory / "fifo").read_text()) if store is None else store.port
        address = StoreAddress(hosts=hosts, port=port, boot="another")
        ranks = join_writers(store, address, rank, 2, PATIENCE)
        assert ranks.all_gather(f"{rank}".encode(), RankChannel.SAVER) == [b"0", b"1"]
        dist.destroy_process_group()
        code = 0
    except BaseException:  # noqa: BLE001 (handed to the test)
        (directory / f"failed-{rank}").write_text(traceback.format_exc())
        code = 1
    os._exit(code)


def test_writers_of_two_hosts_join_by_the_first_name_that_answers(tmp_path: Path) -> None:
    """The first one has no address, as with a launcher that knows hosts by other names."""
    os.mkfifo(tmp_path / "fifo")
    hosts = ("no-such-host.invalid", ELSEWHERE)
    calls = [Call(join, (rank, tmp_path, hosts)) for rank in range(2)]
    codes = rank_server(()).run(calls, PATIENCE)
    problems = [f.read_text() for f in tmp_path.glob("failed-*")]
    assert not problems, "\n".join(problems)
    assert list(codes) == [0, 0]


def test_where_no_name_answers_the_error_has_all_of_them() -> None:
    """And says how writers find each other."""
    port = closed_port()
    address = StoreAddress(hosts=["no-such-host.invalid", ELSEWHERE], port=port, boot="another")
    with pytest.raises(
        CheckpointError, match=rf"\['no-such-host.invalid', .*\] port {port}"
    ) as got:
        writer_ranks._connected(address, timedelta(seconds=5))
    assert not isinstance(got.value.__cause__, CheckpointError)
    with pytest.raises(CheckpointError, match=r"writer of rank 1 of 2 has not found.*GLOO_SOCKET"):
        join_writers(None, address, 1, 2, 5.0)
