"""The reference page of pool.toml, made from the dataclasses: `python -m tests.settings_page`."""

from __future__ import annotations

from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from hpstore.agent.agent_config import AgentConfig
from hpstore.config import Settings
from hpstore.format.store_settings import StoreSettings
from hpstore.health.policy.states import PolicyConfig
from hpstore.units import GIB, KIB, MIB

PAGE = Path(__file__).parents[1] / "docs" / "pool-toml.md"
_HEAD = """# pool.toml

`hpstore create` writes this file.
It says where the devices of a pool are on this machine, and holds the pool's key.
Keep a copy of it: without the key no byte of the pool can be checked.

```toml
name = "main"
key = "..."
devices = ["/mnt/a", "/mnt/b", "/mnt/c", "/mnt/d", "/mnt/e", "/mnt/f"]

[settings]
memory_bytes = "512MiB"

[agent]
scrub_days = 7.0
```

Each process reads the file when it opens the pool.
An unknown name, a value of another type or one out of range is an error that names the place.
Sizes may be written as `"64MiB"`, modes as `0o660`.
Times are seconds unless the name says otherwise.
"""
_ADVANCED = """
Few pools need these: the defaults follow from measurements (docs/decisions).
They may stand in the table of the plain settings, too, as they do in older files.
"""


_STORES = """
An object store that device URLs name, as in `s3://NAME@bucket/prefix`.
Secrets do not belong in this file: `credentials` says where they are.

```toml
devices = ["s3://east@pool-0/main", "s3://east@pool-1/main", "s3://west@pool-0/main"]

[stores.east]
endpoint = "https://s3.east.example.org"
region = "us-east-1"
credentials = "env:EAST"          # EAST_ACCESS_KEY_ID, EAST_SECRET_ACCESS_KEY

[stores.west]
endpoint = "https://s3.west.example.org:9000"
credentials = "profile:west"      # of ~/.aws/credentials
capacity_bytes = "10TiB"
```
"""


def page() -> str:
    """The whole page; tests/unit/test_settings_page.py compares it with the one that is kept."""
    parts = [_HEAD]
    for title, owner, advanced in (
        ("`[settings]`", Settings, False),
        ("`[stores.NAME]`", StoreSettings, None),
        ("`[agent]`", AgentConfig, False),
        ("`[advanced]`", Settings, True),
        ("`[agent.advanced]`", AgentConfig, True),
        ("`[agent.policy]`", PolicyConfig, True),
    ):
        rows = [row for row in fields(owner) if row.metadata.get("advanced") is advanced]
        text = {"`[advanced]`": _ADVANCED, "`[stores.NAME]`": _STORES}.get(title, "")
        parts.append(f"\n## {title}\n{text}\n| key | default | meaning |\n| --- | --- | --- |\n")
        parts += [f"| `{row.name}` | {default(row)} | {row.metadata['text']} |\n" for row in rows]
    return "".join(parts)


def default(row: Field[Any]) -> str:
    """As it is written in the file."""
    value: Any = row.default
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if row.name.endswith("_mode"):
        return f"`0o{value:o}`"
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if "_bytes" in row.name and value and value % unit == 0:
            return f'`"{value // unit}{name}"`'
    return f"`{value}`"


if __name__ == "__main__":
    PAGE.write_text(page())
