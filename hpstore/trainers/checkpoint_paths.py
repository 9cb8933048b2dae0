"""Names in the pool for checkpoints that a trainer knows by a path. Pure, but for links."""

from __future__ import annotations

import os

from hpstore.errors import CheckpointError

PathLike = str | os.PathLike[str]


def name_of(path: PathLike, root: str | None) -> str:
    """The name of the checkpoint that a trainer calls `path`.

    `under/` and what follows `root`, or `at/` and the absolute path, or `url/` and the URL. Links
    in the directory are followed, the last component is not.
    """
    text = os.fspath(path)
    if "://" in text:
        return f"url/{text.replace('://', '/', 1)}".rstrip("/")
    folder, last = os.path.split(os.path.abspath(text))
    whole = os.path.join(os.path.realpath(folder), last)
    if root is not None and whole.startswith(f"{root}/"):
        return f"under/{whole[len(root) + 1 :]}"
    return f"at{whole}"


def path_of(name: str, root: str | None) -> str:
    """Inverse of name_of. Raises CheckpointError for a name that needs a `root`."""
    kind, _, rest = name.partition("/")
    if kind == "url":
        return rest.replace("/", "://", 1)
    if kind == "at":
        return f"/{rest}"
    if root is None:
        raise CheckpointError(f"{rest!r} was saved with root=: pass the run's root= here, too")
    return f"{root}/{rest}"
