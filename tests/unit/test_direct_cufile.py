"""What can be said of cuFile's driver without a GPU: its settings, and how it refuses."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from hpstore.errors import DirectUnavailable
from hpstore.loaders.gpu.direct.cufile import (
    CONFIG_VARIABLE,
    LOG_VARIABLE,
    CuFile,
    configuration,
    environment,
    read_counters,
    unlisted,
)


def test_no_log_in_the_current_directory_and_p2pdma_allowed() -> None:
    """libcufile drops cufile.log where it stands, and has P2PDMA off by default."""
    added = environment({}, "/t", system_config=False)
    assert added == {LOG_VARIABLE: "/t/cufile.log", CONFIG_VARIABLE: "/t/cufile.json"}
    assert json.loads(configuration())["properties"] == {
        "allow_compat_mode": True,
        "use_pci_p2pdma": True,
    }


def test_settings_of_the_user_and_the_system_stay() -> None:
    """Only what nobody has set; all but when bouncing is to fail, which is for the probe alone."""
    assert environment({LOG_VARIABLE: "/x"}, "/t", system_config=True) == {}
    assert CONFIG_VARIABLE not in environment({CONFIG_VARIABLE: "/x"}, "/t", system_config=False)
    strict = environment({CONFIG_VARIABLE: "/x"}, "/t", system_config=True, compat=False)
    assert strict[CONFIG_VARIABLE] == "/t/cufile.json"
    assert json.loads(configuration(compat=False))["properties"]["allow_compat_mode"] is False


def test_without_the_package_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """DirectUnavailable with the extra's name."""
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DirectUnavailable, match=r"hpstore\[gpu\]"):
        CuFile().open()


@pytest.mark.parametrize("shape", [(16,), (1, 16)])
def test_counters_are_summed_over_gpus(shape: tuple[int, ...]) -> None:
    """As many as the library says there are, of sixteen places; both shapes that bindings give."""
    numbers = np.arange(16, dtype=np.uint64).reshape(shape)
    gpus = SimpleNamespace(
        n_p2p_reads=numbers,
        n_nvfs_reads=10 * numbers,
        n_posix_reads=100 * numbers,
        n_reads_err=0 * numbers,
    )
    cufile = ModuleType("cufile")
    stats = SimpleNamespace(num_gpus=3, per_gpu_stats=gpus, ptr=0)
    cufile.StatsLevel3 = lambda: stats  # type: ignore[attr-defined]
    cufile.get_stats_l3 = lambda _: None  # type: ignore[attr-defined]
    assert read_counters(cufile) == {"p2p": 3, "nvfs": 30, "posix": 300, "errors": 0}


def test_a_drive_that_udev_does_not_list_is_named(tmp_path: Path, drive: Path) -> None:
    """cuFile says "not registered" to every file then, in containers without /run/udev."""
    with (drive / "x").open("w") as file:
        number = os.fstat(file.fileno()).st_dev
        entry = tmp_path / f"b{os.major(number)}:{os.minor(number)}"
        assert f"{entry}, where cuFile looks" in unlisted(file.fileno(), str(tmp_path))
        entry.write_text("E:ID_FS_TYPE=ext4\n")
        assert unlisted(file.fileno(), str(tmp_path)) == ""
    with Path("/proc/self/stat").open() as file:  # on no drive
        assert unlisted(file.fileno(), str(tmp_path)) == ""
