"""pool.toml: what is wrong is said with its nearest valid name; what a person wrote is kept."""

from __future__ import annotations

import os
import tempfile
from dataclasses import fields, replace
from pathlib import Path

import pytest

from hpstore.config import PoolConfig, Settings, load_config, parse_settings, save_config
from hpstore.errors import ConfigError
from hpstore.runtime.rights import denied_path, rights_hint
from hpstore.units import GIB, MIB

PLAIN = 'name = "main"\ndevices = ["/mnt/a", "/mnt/b"]\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "pool.toml"
    path.write_text(text)
    return path


def test_a_plain_file_is_read(tmp_path: Path) -> None:
    """Name, devices and default settings."""
    config = load_config(write(tmp_path, PLAIN))
    assert config.name == "main"
    assert config.devices == ("/mnt/a", "/mnt/b")
    assert config.settings == Settings()
    assert config.path == tmp_path / "pool.toml"


def test_relative_devices_are_relative_to_the_file(tmp_path: Path) -> None:
    """Not to the working directory; URLs and absolute paths stay as they are."""
    text = 'devices = ["d0", "../d1", "./x/../d2", "/mnt/a", "s3://bucket/x", "file:///mnt/b"]\n'
    (tmp_path / "sub").mkdir()
    config = load_config(write(tmp_path / "sub", text))
    sub = tmp_path / "sub"
    assert config.devices == (
        f"{sub}/d0",
        f"{tmp_path}/d1",
        f"{sub}/d2",
        "/mnt/a",
        "s3://bucket/x",
        "file:///mnt/b",
    )


def test_a_relative_path_of_the_file_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later chdir does not move the pool."""
    write(tmp_path, 'devices = ["d0"]\n')
    monkeypatch.chdir(tmp_path)
    config = load_config("pool.toml")
    assert config.path == tmp_path / "pool.toml"
    assert config.devices == (f"{tmp_path}/d0",)


@pytest.mark.parametrize(
    ("text", "wrong", "near"),
    [
        ('devises = ["/a"]\n', "devises", "devices"),
        (PLAIN + '[setings]\nmemory_bytes = "1GiB"\n', "setings", "settings"),
        (PLAIN + '[settings]\nmemory_byte = "1GiB"\n', "memory_byte", "memory_bytes"),
        (PLAIN + "[settings]\nworkers = 2\n", "workers", "workers_per_device"),
        (PLAIN + "[settings]\nlock_deadline = 2\n", "lock_deadline", "lock_deadline_seconds"),
        (PLAIN + "[settings]\nqqq = 2\n", "qqq", ""),
    ],
)
def test_unknown_keys_name_the_nearest_valid_one(
    tmp_path: Path, text: str, wrong: str, near: str
) -> None:
    """The message has the file, the wrong key and what was probably meant."""
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match="did you mean") as caught:
        load_config(path)
    assert repr(wrong) in str(caught.value)
    assert near in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "setting",
    [
        'memory_bytes = "lots"',
        "memory_bytes = 1e9",
        "memory_bytes = true",
        "workers_per_device = 2.0",
        "workers_per_device = true",
        'direct = "yes"',
        "direct = 1",
        'put_deadline_seconds = "10"',
        "put_deadline_seconds = true",
        "run_directory = 5",
        "queue_depth = [1]",
        "file_mode = 0.5",
    ],
)
def test_settings_of_the_wrong_type_are_refused(tmp_path: Path, setting: str) -> None:
    """No setting is guessed from another type."""
    with pytest.raises(ConfigError):
        load_config(write(tmp_path, f"{PLAIN}[settings]\n{setting}\n"))


@pytest.mark.parametrize(
    "text",
    [
        'name = "x"\n',
        "devices = []\n",
        'devices = "/mnt/a"\n',
        "devices = [1, 2]\n",
        'settings = 3\ndevices = ["/a"]\n',
        'name = 3\ndevices = ["/a"]\n',
        "devices = [\n",
        'devices = ["/a"]\ndevices = ["/b"]\n',
    ],
)
def test_files_of_the_wrong_form_are_refused(tmp_path: Path, text: str) -> None:
    """ConfigError with the file's name, never another exception."""
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    """Absent, a directory, or not UTF-8."""
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "raw.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "raw.toml")


def test_sizes_may_be_written_with_units(tmp_path: Path) -> None:
    """ "64MiB" is bytes; a whole number is one too; a whole number of seconds is a float."""
    text = '[settings]\nmemory_bytes = "64MiB"\nrecycle_bytes = 0\nlock_deadline_seconds = 3\n'
    settings = load_config(write(tmp_path, PLAIN + text)).settings
    assert settings.memory_bytes == 64 * MIB
    assert settings.recycle_bytes == 0
    assert settings.lock_deadline_seconds == 3.0
    assert parse_settings({"recycle_bytes": "1.5GiB"}, where="x").recycle_bytes == 3 * GIB // 2


@pytest.mark.parametrize(
    "values",
    [
        {"memory_bytes": 15 * MIB},
        {"workers_per_device": 0},
        {"queue_depth": 0},
        {"compute_threads": -1},
        {"lock_deadline_seconds": 0.0},
        {"lock_deadline_seconds": float("nan")},
        {"straggler_seconds": -1.0},
        {"tombstone_seconds": 600.0},
    ],
)
def test_settings_out_of_range_are_refused_by_name(values: dict[str, object]) -> None:
    """A limit of 0 or a horizon shorter than a put would undo a promise."""
    with pytest.raises(ConfigError, match=next(iter(values))):
        parse_settings(values, where="x")


def test_run_path_is_local_and_of_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the temporary directory of the machine unless it is set; the pool's id is its end."""
    monkeypatch.setattr(tempfile, "tempdir", "/somewhere")
    assert Settings().run_path("abc") == Path(f"/somewhere/hpstore-{os.getuid()}/abc")
    assert Settings(run_directory="/run/x").run_path("abc") == Path("/run/x/abc")


def test_a_saved_file_reads_back_equal(tmp_path: Path) -> None:
    """Every setting that differs from its default is written."""
    settings = Settings(memory_bytes=32 * MIB, direct=False, file_mode=0o640, run_directory="/run")
    config = PoolConfig(
        path=tmp_path / "pool.toml", name="a b", devices=("/mnt/ä", "s3://x"), settings=settings
    )
    save_config(config)
    assert load_config(config.path) == config
    assert [p.name for p in tmp_path.iterdir()] == ["pool.toml"]


def test_every_single_setting_survives_saving(tmp_path: Path) -> None:
    """One file a setting, with a value that is not the default."""
    for setting in fields(Settings):
        value = getattr(Settings(), setting.name)
        if isinstance(value, bool):
            other: object = not value
        elif isinstance(value, str):
            group = "7" if os.geteuid() == 0 else str(os.getegid())  # one that may be given
            other = {"group": group, "tls": "plain"}.get(setting.name, "/run")
        else:
            other = value + type(value)(1)
        config = PoolConfig(
            path=tmp_path / f"{setting.name}.toml",
            name="x",
            devices=("/a",),
            settings=parse_settings({setting.name: other}, where="x"),
        )
        save_config(config)
        assert getattr(load_config(config.path).settings, setting.name) == other


def test_a_path_where_nothing_is_can_be_named_for_its_rights(tmp_path: Path) -> None:
    """As a pool.toml that could not be made."""
    place = str(tmp_path / "pool.toml")
    assert denied_path(place) == place
    assert f"no rights on {place}" in rights_hint(place)


COMMENTED = """\
# our pool, ask Ada
name = "main"  # the name

devices = ["/mnt/a"]

# limits of this machine
[settings]
# half of what we have
memory_bytes = "1GiB"  # was 2
"""


def test_saving_keeps_comments_and_settings(tmp_path: Path) -> None:
    """A new list of devices leaves what an operator wrote, and its order of sections."""
    path = write(tmp_path, COMMENTED)
    config = load_config(path)
    save_config(replace(config, devices=("/mnt/a", "/mnt/b")))
    text = path.read_text()
    for line in (
        "# our pool, ask Ada",
        'name = "main"  # the name',
        "# limits of this machine",
        "# half of what we have",
        'memory_bytes = "1GiB"  # was 2',
    ):
        assert line in text
    again = load_config(path)
    assert again.devices == ("/mnt/a", "/mnt/b")
    assert again.settings == config.settings
    assert text.index("devices") < text.index("[settings]")


def test_saving_often_does_not_grow_the_file(tmp_path: Path) -> None:
    """The tenth save leaves the bytes of the first."""
    path = write(tmp_path, COMMENTED)
    config = load_config(path)
    save_config(config)
    first = path.read_text()
    for _ in range(9):
        save_config(load_config(path))
    assert path.read_text() == first


def test_devices_stay_at_the_top_level_when_a_file_has_only_settings(tmp_path: Path) -> None:
    """A list appended below [settings] would belong to that table."""
    path = write(tmp_path, '[settings]\nmemory_bytes = "1GiB"\n')
    save_config(PoolConfig(path=path, name="x", devices=("/mnt/a",)))
    assert load_config(path).devices == ("/mnt/a",)
    assert load_config(path).settings.memory_bytes == GIB


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new text is complete and synced before it takes the name."""
    path = write(tmp_path, PLAIN)

    def fail(fd: int) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ConfigError, match="cannot be written: no"):
        save_config(replace(load_config(path), devices=("/mnt/z",)))
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == PLAIN
