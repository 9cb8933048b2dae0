"""Checkpoint tools: other tools read what is exported, what they wrote is imported, bit by bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import hpstore
from hpstore.checkpoint import Checkpointer, Manifest, SaveOptions, import_checkpoint
from hpstore.checkpoint.catalog.fence_record import fence_key
from hpstore.checkpoint.catalog.writer_fence import here
from hpstore.checkpoint.convert import dcp_directories
from hpstore.checkpoint.convert.safetensors_files import DTYPES
from hpstore.checkpoint.format.items import Box, Item, whole
from hpstore.checkpoint.restore import tensor_stream, whole_tensors
from hpstore.checkpoint.state.state_tree import CollectedTensors, encode_tree
from hpstore.checkpoint.state.tree_paths import leaves, only_branch, stripped, subtree
from hpstore.cli.checkpoint_tables import described
from hpstore.errors import CheckpointError, ConfigError, IntegrityError, VersionConflict
from hpstore.format.records import FORMAT, seal
from tests.integration.exported_runs import FORMATS, RUN, all_dtypes, export, same, save, training

# --- round trips --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
def test_every_dtype_comes_back_bit_by_bit(pool: hpstore.Pool, tmp_path: Path, kind: str) -> None:
    """All dtypes of a format, exported and imported, and read by that format's own reader."""
    dtypes = list(DTYPES.values())
    dtypes += [torch.complex128] if kind != "safetensors" else []
    wanted = all_dtypes(dtypes)
    save(pool, 1, {"w": dict(wanted)})
    target = tmp_path / "out"
    export(pool, target, format=kind, keys=["w"], strip="w")
    assert set(own_reader(kind, target, wanted)) == set(wanted)
    for name, tensor in own_reader(kind, target, wanted).items():
        assert same(tensor, wanted[name]), name
    import_checkpoint(pool, "runs/b", 7, target, format=kind, under="w")
    with Checkpointer(pool, "runs/b") as checkpointer:
        found = checkpointer.load(7)
    assert set(found) == {f"w/{name}" for name in wanted}
    assert all(same(found[f"w/{name}"], tensor) for name, tensor in wanted.items())


def own_reader(kind: str, target: Path, wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the format's own library finds in an export."""
    if kind == "safetensors":
        raw = (target / "model.safetensors").read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        starts = [
            (e["data_offsets"][0], DTYPES[e["dtype"]].itemsize)
            for name, e in header.items()
            if name != "__metadata__"
        ]
        assert all(start % width == 0 for start, width in starts)  # as CUDA and mmap like it
        return safetensors.torch.load_file(target / "model.safetensors")
    if kind == "torch":
        loaded: dict[str, torch.Tensor] = torch.load(target, weights_only=True)
        return loaded
    state = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp_load(state, checkpoint_id=target, no_dist=True)
    return state


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_a_training_resumes_from_an_export(pool: hpstore.Pool, tmp_path: Path, kind: str) -> None:
    """Model, optimizer, values and RNG states go out and in; the next numbers are the same."""
    state = training(3)
    save(pool, 1, state)
    expected = (torch.rand(3), np.random.random())
    export(pool, tmp_path / "out", format=kind)
    import_checkpoint(pool, "runs/b", 1, tmp_path / "out", format=kind)
    fresh = training(4)
    with Checkpointer(pool, "runs/b") as checkpointer:
        assert checkpointer.restore(fresh) == 1
    assert torch.equal(torch.rand(3), expected[0])
    assert np.random.random() == expected[1]
    assert (fresh["epoch"], fresh["note"], fresh["list"]) == (3, "x", [1, (2.5,)])
    for name, value in state["model"].state_dict().items():
        assert same(fresh["model"].state_dict()[name], value)
    moments = zip(state["optimizer"].state.values(), fresh["optimizer"].state.values(), strict=True)
    assert all(same(a[name], b[name]) for a, b in moments for name in a)


def test_a_torch_file_holds_what_load_state_gives(pool: hpstore.Pool, tmp_path: Path) -> None:
    """weights_only=True takes it, values keep their types, other ZIP readers find CRCs right."""
    save(
        pool,
        1,
        {
            "deep": {"t": torch.ones(2), 5: [torch.zeros(1), None]},
            "np": np.arange(3),
            "number": np.float32(0.1),
            "inf": float("inf"),
            "raw": b"\xff",
            "z": 1 + 2j,
            "dtype": torch.bfloat16,
            "size": torch.Size([2]),
        },
    )
    export(pool, tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert torch.equal(found["deep"]["t"], torch.ones(2))
    assert found["deep"][5][1] is None
    assert torch.equal(found["np"], torch.arange(3))
    assert found["number"] == np.float32(0.1)
    assert found["raw"] == b"\xff"
    assert (found["inf"], found["z"], found["dtype"]) == (float("inf"), 1 + 2j, torch.bfloat16)
    assert found["size"] == torch.Size([2])
    assert zipfile.ZipFile(tmp_path / "all.pt").testzip() is None


def test_a_model_goes_to_a_sharded_folder_and_back(pool: hpstore.Pool, tmp_path: Path) -> None:
    """Hugging Face's file names, an index that is right, names as the module has them."""
    state = training(1)
    save(pool, 1, state)
    report = export(pool, tmp_path / "hf", keys=["model"], max_shard_bytes="10kb")
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    wanted = state["model"].state_dict()
    assert report.tensors == len(wanted)
    assert set(index["weight_map"]) == set(wanted)
    total = sum(t.numel() * t.element_size() for t in wanted.values())
    assert index["metadata"]["total_size"] == total
    files = sorted(set(index["weight_map"].values()))
    assert files == [
        f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))
    ]
    assert len(files) > 1
    for name, file in index["weight_map"].items():
        assert same(safetensors.torch.load_file(tmp_path / "hf" / file)[name], wanted[name])
    import_checkpoint(pool, "runs/b", 0, tmp_path / "hf", under="model")
    fresh = {"model": training(2)["model"]}
    with Checkpointer(pool, "runs/b", rng=False) as checkpointer:
        checkpointer.restore(fresh)
    assert all(same(fresh["model"].state_dict()[name], t) for name, t in wanted.items())


def test_safetensors_leaves_out_values_and_says_so(pool: hpstore.Pool, tmp_path: Path) -> None:
    """The report lists numbers, strings and RNG states; the optimizer's tensors are there."""
    save(pool, 1, training(1))
    report = export(pool, tmp_path / "all.safetensors")
    assert {"epoch", "note", "list", "optimizer/param_groups/0/lr"} <= set(report.left_out)
    assert any(path.startswith("__rng__@0/") for path in report.left_out)
    names = set(safetensors.torch.load_file(tmp_path / "all.safetensors"))
    assert {"model.0.weight", "optimizer.state.0.weight.exp_avg"} <= names


def test_files_of_the_stock_writers_are_imported(pool: hpstore.Pool, tmp_path: Path) -> None:
    """safetensors.torch.save_file, torch.save (new and old format) and dcp.save, as they write."""
    wanted = {"a.weight": torch.randn(3, 4, dtype=torch.bfloat16), "b": torch.arange(5)}
    safetensors.torch.save_file(wanted, tmp_path / "s.safetensors")
    torch.save(wanted, tmp_path / "t.pt")
    torch.save(wanted, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp_save(dict(wanted), checkpoint_id=tmp_path / "d", no_dist=True)
    sources = [(name, False) for name in ("s.safetensors", "t.pt", "old.pt", "d")]
    for step, (name, trusted) in enumerate([*sources, ("d", True)]):
        import_checkpoint(pool, RUN, step, tmp_path / name, under="m", allow_pickle=trusted)
        with Checkpointer(pool, RUN) as checkpointer:
            found = checkpointer.load(step)
        assert all(same(found[f"m/{n}"], t) for n, t in wanted.items()), name


def test_compressed_and_small_groups_export_alike(
    pool: hpstore.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With frames in the segments and one tensor in memory at a time the bytes are the same."""
    wanted = {"a": torch.zeros(3000, 100), "b": torch.randn(1000), "c": torch.ones(7)}
    with Checkpointer(pool, RUN, save=SaveOptions(compression="zstd")) as checkpointer:
        checkpointer.save(1, {"m": dict(wanted)}).result()
    monkeypatch.setattr(tensor_stream, "GROUP_BYTES", 1)
    seen: list[tuple[int, int]] = []
    export(pool, tmp_path / "m.safetensors", progress=lambda *step: seen.append(step))
    found = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert all(same(found[name], tensor) for name, tensor in wanted.items())
    monkeypatch.setattr(dcp_directories, "FILE_BYTES", 1)
    export(pool, tmp_path / "dcp", format="dcp", keys=["m"], strip="m")
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 3
    for name, tensor in own_reader("dcp", tmp_path / "dcp", wanted).items():
        assert same(tensor, wanted[name])
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (1_204_028, 1_204_028)


# --- nothing half, nothing lost ------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("force", [False, True])
def test_a_failed_export_leaves_what_was_there(
    pool: hpstore.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, force: bool
) -> None:
    """A read that fails in the middle: no new file at all, and an older export is untouched."""
    save(pool, 1, {"m": {"a": torch.zeros(10), "b": torch.ones(10)}})
    place = tmp_path / "exports"
    place.mkdir()
    if force:
        export(pool, place / "out", format=kind)
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    read = whole_tensors.load_tensors

    def failing(pool: Any, manifest: Any, names: Any, device: Any) -> Any:
        if "m/b" in names:
            raise IntegrityError("damaged")
        return read(pool, manifest, names, device)

    monkeypatch.setattr(tensor_stream, "GROUP_BYTES", 1)
    monkeypatch.setattr(tensor_stream, "load_tensors", failing)
    with pytest.raises(IntegrityError, match="damaged"):
        export(pool, place / "out", format=kind, force=force)
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before
    assert force or list(place.iterdir()) == []


def test_a_killed_export_is_not_under_its_name(pool: hpstore.Pool, tmp_path: Path) -> None:
    """The process dies between two tensors; the name is free, the next export works."""
    save(pool, 1, {"m": {"a": torch.zeros(10), "b": torch.ones(10)}})
    code = (
        "import os, hpstore\n"
        "from hpstore.checkpoint import export_checkpoint\n"
        "pool = hpstore.open('pool.toml', read_only=True)\n"
        f"export_checkpoint(pool, {RUN!r}, 1, 'out', progress=lambda d, t: os._exit(9))\n"
    )
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, timeout=120)
    assert done.returncode == 9
    assert not (tmp_path / "out").exists()
    assert [path.name.endswith(".part") for path in tmp_path.glob(".out.*")] == [True]
    export(pool, tmp_path / "out")


def test_an_existing_target_is_refused(pool: hpstore.Pool, tmp_path: Path) -> None:
    """Without force nothing is replaced; with it only exports, no folder with other files."""
    save(pool, 1, {"m": {"a": torch.zeros(10)}})
    (tmp_path / "x.pt").write_bytes(b"mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_bytes(b"mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link.pt").symlink_to(tmp_path / "x.pt")
    with pytest.raises(ConfigError, match=r"force=True \(--yes\)"):
        export(pool, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").read_bytes() == b"mine"
    for force in (False, True):
        with pytest.raises(ConfigError, match=r"thesis\.txt"):
            export(pool, tmp_path / "folder", force=force)
        with pytest.raises(ConfigError, match="no directory"):
            export(pool, tmp_path / "x.pt", format="dcp", force=force)
        with pytest.raises(ConfigError, match="no regular file"):
            export(pool, tmp_path / "link.pt", force=force)
    with pytest.raises(ConfigError, match="not a directory"):
        export(pool, tmp_path / "absent" / "x.pt")
    export(pool, tmp_path / "x.pt", force=True)
    export(pool, tmp_path / "empty")
    assert "m" in torch.load(tmp_path / "x.pt", weights_only=True)


def test_an_import_takes_no_running_trainings_right(pool: hpstore.Pool, tmp_path: Path) -> None:
    """The last writer's process lives: refused, unless told to take over."""
    torch.save({"a": torch.zeros(3)}, tmp_path / "a.pt")
    host, boot, _ = here()
    body = {"format": FORMAT, "session": "s", "host": host, "boot": boot, "pid": os.getppid()}
    pool.put(fence_key(RUN), seal(dict(body)))
    with pytest.raises(VersionConflict, match="take-over"):
        import_checkpoint(pool, RUN, 1, tmp_path / "a.pt")
    import_checkpoint(pool, RUN, 1, tmp_path / "a.pt", take_over=True)
    with pytest.raises(VersionConflict, match="exists"):
        import_checkpoint(pool, RUN, 1, tmp_path / "a.pt")
    import_checkpoint(pool, RUN, 1, tmp_path / "a.pt", overwrite=True)


# --- the commands -------------------------------------------------------------------------------


def test_an_import_tells_how_far_it_is(pool: hpstore.Pool, tmp_path: Path) -> None:
    """Bytes as they are written, not one tick at the end; a save tells the same."""
    tensors = {"a": torch.zeros(6_000_000), "b": torch.zeros(3, dtype=torch.uint8)}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    seen: list[tuple[int, int]] = []
    import_checkpoint(
        pool, "runs/b", 0, tmp_path / "x.safetensors", progress=lambda *step: seen.append(step)
    )
    total = 24_000_003
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)
    assert len({done for done, _ in seen}) > 4


def test_inspect_shows_boxes_frames_and_values_kept_by_rank() -> None:
    """A tensor in two boxes, one that is compressed, a value of each rank, a pickle."""
    half = Box(offsets=(0, 0), sizes=(2, 4))
    first = Item(name="w", dtype="float32", shape=(4, 4), box=half, offset=0, length=32)
    small = replace(first, name="z", shape=(64,), box=whole((64,)), codec="zstd", frames=(32,))
    items = (first, replace(first, box=half.moved((2, 0))), small)
    tree = {
        "w": {"$": "tensor", "item": "w"},
        "z": {"$": "tensor", "item": "z"},
        "n": {"$": "ranks", "v": {"0": 5, "1": 6}},
        "p": {"$": "pickle", "v": ""},
    }
    manifest = Manifest(step=1, created_ms=0, segments=(), items=items, tree=tree, world=2)
    found = described(manifest, None, [], None)
    assert found.tensors["w"]["boxes"] == [[(0, 0), (2, 4)], [(2, 0), (2, 4)]]
    assert found.values == {"n@0": "5", "n@1": "6", "p": "<pickled object>"}
    assert found.summary["compression_ratio"] == (64 + 256) / 96


# --- the outline --------------------------------------------------------------------------------


def test_keys_choose_parts_of_a_tree() -> None:
    """Subtrees by path, in dicts of any keys; prefixes come off; lists stay whole."""
    state = {"m": {"a/b": torch.zeros(1), "c": 1}, "n": {5: {"d": 2}}, "l": [torch.ones(1), {}]}
    tree = encode_tree(state, "", CollectedTensors())
    assert [leaf.path for leaf in leaves(tree)] == ["m/a/b", "m/c", "n/5/d", "l/0"]
    assert [leaf.path for leaf in leaves(subtree(tree, ["m/a/b", "n/5"]))] == ["m/a/b", "n/5/d"]
    assert [leaf.path for leaf in leaves(stripped(subtree(tree, ["m"]), "m/"))] == ["a/b", "c"]
    assert only_branch(subtree(tree, ["m", "n"])) == "m"
    assert only_branch(tree) == ""
    for key in ("m/q", "l/0", "x", ""):
        with pytest.raises(CheckpointError, match="holds nothing"):
            subtree(tree, [key])
    deep: Any = 1
    for _ in range(50):
        deep = [deep]
    assert len(list(leaves(deep))) == 1
