"""Host commands: serve this host's disks to pools on other hosts; make certificates."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hpstore.agent.http_server import parse_listen
from hpstore.cli.options import Json, size_option
from hpstore.cli.output import log_with_times, say
from hpstore.config import Settings
from hpstore.errors import ConfigError
from hpstore.units import GIB, MIB

hosts = typer.Typer(
    no_args_is_help=True, help="Disks of this host for pools on others: serve, init."
)
_NEEDS = "install hpstore[hosts], which has it"
Recycle = Annotated[int, size_option("files kept for overwriting, on each disk", "2GiB")]
Memory = Annotated[int, size_option("for bodies under way", "256MiB")]


@hosts.command()
def serve(
    disks: Annotated[list[str], typer.Argument(help="directories, numbered from 0 in this order")],
    listen: Annotated[str, typer.Option(help="ADDRESS:PORT of the storage network")],
    tls: Annotated[
        str,
        typer.Option(
            help='"mutual"; where only these hosts can reach the network "control", TLS without '
            'bodies, or "plain"'
        ),
    ] = "mutual",
    data_port: Annotated[
        int | None, typer.Option(help="for bodies, with --tls control; default: the next port")
    ] = None,
    certificates: Annotated[
        Path | None, typer.Option(help="directory of ca.pem, certificate.pem and key.pem")
    ] = None,
    registers: Annotated[
        Path | None,
        typer.Option(help="directory for registers of pools, as host://ADDRESS:PORT: no etcd"),
    ] = None,
    recycle: Recycle = 2 * GIB,
    direct: Annotated[bool, typer.Option(help="O_DIRECT")] = True,
    connections: Annotated[int, typer.Option(help="at once, of all callers")] = 1024,
    handles: Annotated[int, typer.Option(help="files open at once, of all callers")] = 16384,
    memory: Memory = 256 * MIB,
    as_json: Json = False,
) -> None:
    """Serve disks of this host, each as hpd://HOST:PORT/NUMBER, until it is ended.

    hpstore host serve --listen 10.0.0.2:7200 /mnt/a /mnt/b
    """
    try:
        from hpstore.hosts.host_limits import make_limits
        from hpstore.hosts.running_service import default_certificates, run_until_ended, serving
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed: {_NEEDS}") from error
    log_with_times()
    host, port = parse_listen(listen)
    settings = Settings(
        tls=tls,
        certificates=default_certificates(certificates),
        recycle_bytes=recycle,
        direct=direct,
    )
    with serving(
        host.strip("[]"),
        port,
        disks,
        settings,
        make_limits(connections=connections, handles=handles, memory_bytes=memory),
        registers=registers,
        data_port=data_port,
    ) as service:
        run_until_ended(lambda: _say_disks(disks, *service.address, as_json=as_json))


def _say_disks(disks: list[str], at: str, port: int, *, as_json: bool) -> None:
    at = f"[{at}]" if ":" in at else at
    urls = {f"hpd://{at}:{port}/{index}": disk for index, disk in enumerate(disks)}
    say(urls, "\n".join(f"{url} is {disk}" for url, disk in urls.items()), as_json=as_json)
    sys.stdout.flush()


@hosts.command()
def init(
    directory: Annotated[Path, typer.Argument(help="of the authority and what it makes")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="NAME or NAME=ADDRESS,... of a host whose service needs a certificate"),
    ] = None,
    caller: Annotated[
        list[str] | None,
        typer.Option(help="NAME:ROLE of a process; roles are reader, writer and keeper"),
    ] = None,
    days: Annotated[int, typer.Option(help="that new certificates are good for")] = 397,
    as_json: Json = False,
) -> None:
    """Make certificates of hosts and callers, and at first the authority that signs them.

    hpstore host init tls --host b=10.0.0.2 --host c=10.0.0.3 --caller trainer:keeper
    """
    try:
        from hpstore.hosts.caller_roles import CallerRole
        from hpstore.hosts.certificates import make_caller, make_host

        made = [
            make_host(directory, name, [a for a in addresses.split(",") if a], days)
            for name, _, addresses in (text.partition("=") for text in host or ())
        ]
        for text in caller or ():
            name, _, role = text.rpartition(":")
            if not name or role.upper() not in CallerRole.__members__:
                raise ConfigError(
                    f"{text!r} is no caller: give NAME:reader, NAME:writer or NAME:keeper"
                )
            made.append(make_caller(directory, name, CallerRole[role.upper()], days))
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed: {_NEEDS}") from error
    if not made:
        raise ConfigError("name what needs a certificate: --host NAME or --caller NAME:ROLE")
    lines = "\n".join(f"{place}: copy its files to {_target(place)}" for place in made)
    say({"made": [str(place) for place in made]}, lines, as_json=as_json)


def _target(place: Path) -> str:
    host = place.parent.name == "hosts"
    return f"host {place.name}" if host else f"~/.config/hpstore/tls of {place.name}"
