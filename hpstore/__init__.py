"""hpstore: an erasure-coded storage layer for training. Data in, checkpoints out.

pool = hpstore.create(["/mnt/a", "/mnt/b", ...], data=4, parity=2, config="pool.toml")
pool.put("hello", b"world")
hpstore.open("pool.toml").get("hello")
"""

from hpstore import errors
from hpstore.errors import HpstoreError
from hpstore.maintenance.rebuild import Progress, RebuildReport
from hpstore.objects.object_info import ObjectInfo
from hpstore.objects.version_listing import VersionInfo
from hpstore.pool.create_pool import create_pool as create
from hpstore.pool.create_pool import open_pool as open  # noqa: A004 (hpstore.open is the public name)
from hpstore.pool.pool import Pool
from hpstore.pool.status import DeviceStatus, PoolStatus

__version__ = "0.1.0"

__all__ = [
    "DeviceStatus",
    "HpstoreError",
    "ObjectInfo",
    "Pool",
    "PoolStatus",
    "Progress",
    "RebuildReport",
    "VersionInfo",
    "create",
    "errors",
    "open",
]
