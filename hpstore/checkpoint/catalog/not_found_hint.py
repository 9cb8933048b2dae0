"""Where checkpoints are, for the message to somebody who looked where there are none."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from hpstore.checkpoint.format.checkpoint_manifest import STEP_DIGITS
from hpstore.errors import HpstoreError
from hpstore.pool.pool import Pool

SAVES = "saves"  # below the prefix of a trainer that knows its checkpoints by name
_SHOWN = 3
_STEP = re.compile(rf"(.+)/step-\d{{{STEP_DIGITS}}}/manifest")
_RANK = re.compile(r"(.+)/manifest(?:-r\d+)?")
_MARKER = "/.metadata"  # beside the manifest of a StorageWriter


def prefixes_in(keys: Iterable[str]) -> list[str]:
    """Prefixes under which a Checkpointer has committed steps, sorted. Pure."""
    return sorted({found[1] for found in map(_STEP.fullmatch, keys) if found})


def paths_in(keys: Sequence[str]) -> list[str]:
    """Paths at which a StorageWriter has committed, sorted. Pure."""
    marked = {key.removesuffix(_MARKER) for key in keys if key.endswith(_MARKER)}
    return sorted({found[1] for found in map(_RANK.fullmatch, keys) if found} & marked)


def nearest(wanted: str, names: Sequence[str]) -> list[str]:
    """Up to three names: those above and below `wanted` first, then the most alike. Pure."""
    kin = [n for n in names if n.startswith(f"{wanted}/") or wanted.startswith(f"{n}/")]
    alike = difflib.get_close_matches(wanted, names, _SHOWN, 0.0)
    return list(dict.fromkeys([*kin, *alike]))[:_SHOWN]


def nothing_under(pool: Pool, prefix: str) -> str:
    """What to tell when a Checkpointer's prefix holds no steps. Walks the pool's keys."""
    try:
        keys = pool.list()
    except (HpstoreError, OSError) as error:
        return f"no checkpoints under {prefix!r} (others were not looked for: {error})"
    if prefix in paths_in(keys):
        return (
            f"no checkpoints of a Checkpointer under {prefix!r}; what is there was saved by "
            "torch.distributed.checkpoint: dcp.load(state, storage_reader=StorageReader(pool, "
            f"{prefix!r}))"
        )
    return f"no checkpoints under {prefix!r}; {_elsewhere(prefix, prefixes_in(keys), 'under')}"


def nothing_at(pool: Pool, path: str) -> str:
    """What to tell when no StorageWriter has saved at a path. Walks the pool's keys."""
    try:
        keys = pool.list()
    except (HpstoreError, OSError) as error:
        return f"no checkpoint is at {path!r} (others were not looked for: {error})"
    if path in prefixes_in(keys):
        return f"no checkpoint of torch.distributed.checkpoint is at {path!r}: {use_ours(path)}"
    return f"no checkpoint is at {path!r}; {_elsewhere(path, paths_in(keys), 'at')}"


def use_ours(prefix: str) -> str:
    """What reads the steps of a Checkpointer."""
    return (
        f"{prefix!r} holds steps of a Checkpointer. Checkpointer(pool, {prefix!r}).restore(state) "
        "fills a state, .load(step) gives tensors by name, `hpstore checkpoint export ... --format "
        "dcp` makes a directory that dcp.load reads"
    )


def _elsewhere(wanted: str, names: Sequence[str], word: str) -> str:
    if not names:
        return "there are none elsewhere in this pool"
    shown = nearest(wanted, names)
    more = f" and {len(names) - len(shown)} others" if len(names) > len(shown) else ""
    return f"there are some {word} {', '.join(map(repr, shown))}{more}"
