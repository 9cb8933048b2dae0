"""Register commands: where the processes of a pool agree; move them, look at them, reset them."""

from __future__ import annotations

from typing import Annotated

import typer

import hpstore
from hpstore.cli.confirm import agree
from hpstore.cli.options import Json, PoolName, Yes
from hpstore.cli.output import emit_json, write_out
from hpstore.pool.register_report import RegisterReport

registers = typer.Typer(
    no_args_is_help=True,
    help="Where the processes of a pool agree: on its devices, in etcd, in an object store.",
)

Url = Annotated[
    str,
    typer.Argument(
        help="devices, etcd://HOST:PORT,.../PREFIX, etcds://..., s3://BUCKET/PREFIX, host://HOST:PORT"
    ),
]


@registers.command(name="set")
def set_registers(pool: PoolName, url: Url, as_json: Json = False) -> None:
    """Move a pool's registers, while processes use them.

    hpstore registers set pool.toml etcd://a:2379,b:2379,c:2379

    Conditional puts, commits of checkpoints and changes of the membership wait meanwhile.
    """
    with hpstore.open(pool) as opened:
        _show(opened.admin.move_registers(url), "moved to ", as_json=as_json)


@registers.command()
def show(pool: PoolName, as_json: Json = False) -> None:
    """Show where a pool's registers are, and whether they answer.

    hpstore registers show pool.toml
    """
    with hpstore.open(pool) as opened:
        _show(opened.admin.registers_report(), "", as_json=as_json)


@registers.command()
def reset(
    pool: PoolName,
    url: Annotated[str, typer.Argument(help="where they are made again; default: as before")] = "",
    force: Annotated[
        bool, typer.Option("--force", help="also while the old ones answer: give them up")
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Make registers again that are lost, from what the pool's devices know.

    hpstore registers reset pool.toml

    Refused while the old ones answer. No object is touched.
    """
    with hpstore.open(pool) as opened:
        old = opened.admin.registers_report()
        agree(f"give up the registers at {old.url} and make new ones", yes=yes)
        _show(opened.admin.reset_registers(url, force=force), "made again at ", as_json=as_json)


def _show(found: RegisterReport, done: str, *, as_json: bool) -> None:
    if as_json:
        emit_json(found.as_dict())
        return
    state = "answer" if not found.problem else "do not answer"
    lines = [f"registers {done}{found.url} ({found.kind}): they {state}"]
    lines[0] += f" in {1000 * found.read_seconds:.1f} ms" if not found.problem else ""
    lines += [f"  {place}: {why or 'answers'}" for place, why in found.endpoints.items()]
    lines += [found.problem] if found.problem else []
    write_out("\n".join(lines) + "\n")
