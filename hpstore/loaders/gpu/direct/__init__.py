"""Reads straight into GPU memory, where cuFile can: the driver, whether it works, decode, choice.

`engine` reads ranges of files into an arena over a `DirectDriver`; `cufile` is NVIDIA's. `detect`
tells, from a child process, what cuFile really does for a directory. `decode` and `verify` replace
lost units and check blocks on the GPU. `choice` decides between this path and pinned memory by
what both were measured at; `access` is all of that for a DataLoader. Nothing here is imported by
`hpstore.loaders` before it is used.
"""

from __future__ import annotations
