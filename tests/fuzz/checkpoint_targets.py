"""Parsers of checkpoints: what lies in a pool, and what ranks say to each other."""

from __future__ import annotations

import collections
import datetime
import decimal
import json
import pathlib
import random
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hpstore.checkpoint.catalog.hidden_steps import Rollback
from hpstore.checkpoint.catalog.step_catalog import decode_protection
from hpstore.checkpoint.catalog.watch_cursor import Commit
from hpstore.checkpoint.catalog.watch_cursor import _Record as CursorRecord
from hpstore.checkpoint.catalog.writer_fence import SaveAttempt
from hpstore.checkpoint.dcp.dcp_metadata import torch_metadata
from hpstore.checkpoint.format.checkpoint_manifest import MAGIC, Manifest, needs_more, sort_out
from hpstore.checkpoint.format.items import FRAME_BYTES, Item, by_name, whole
from hpstore.checkpoint.format.pack import Segment
from hpstore.checkpoint.format.segment_codecs import decode
from hpstore.checkpoint.format.segment_plan import chunks_of
from hpstore.checkpoint.restore.chosen_names import choose
from hpstore.checkpoint.restore.load_options import LoadOptions
from hpstore.checkpoint.restore.read_items import SegmentReads, reads_for
from hpstore.checkpoint.state.state_tree import (
    CollectedTensors,
    Decoding,
    PerRank,
    check_tree,
    decode_tree,
    encode_tree,
    tensor_names,
)
from hpstore.checkpoint.state.tree_paths import leaves, of_rank, only_branch, paths, plain
from hpstore.codec.compression import encoder
from hpstore.errors import HpstoreError
from hpstore.format.checksum import digest128
from hpstore.format.records import seal
from hpstore.format.untrusted_bytes import parsing
from hpstore.loaders.sampling.loader_state import LoaderState
from hpstore.trainers.named_checkpoints import Named
from hpstore.trainers.pipelining.consumed_samples import Ledger, Vote
from hpstore.trainers.rank_messages import of_bytes, to_bytes
from tests.fuzz.engine import Target
from tests.fuzz.pool_targets import record
from tests.fuzz.weight_file_targets import LARGE

Point = collections.namedtuple("Point", "x y")
STATE: dict[str, Any] = {
    "w": torch.arange(6.0).reshape(2, 3),
    "n": 5,
    "f": float("nan"),
    "big": 1 << 80,
    "t": (1, "a"),
    "p": Point(1, 2),
    "s": {1, 2},
    "d": collections.deque([1], 4),
    "c": collections.Counter("ab"),
    "o": collections.OrderedDict(a=1),
    "dd": collections.defaultdict(int, a=1),
    "b": b"xyz",
    "k": {1: "x", (2, 3): torch.ones(2)},
    "path": pathlib.PurePosixPath("/a"),
    "u": uuid.UUID(int=5),
    "dec": decimal.Decimal("1.5"),
    "z": 1 + 2j,
    "np": np.float32(2.5),
    "arr": np.arange(4),
    "dt": torch.float16,
    "ndt": np.dtype("<i4"),
    "size": torch.Size([2, 3]),
    "dev": torch.device("cpu"),
    "sl": slice(1, 5, 2),
    "r": range(4),
    "when": datetime.datetime(2024, 1, 2, 3, 4, tzinfo=datetime.UTC),
    "td": datetime.timedelta(1, 2, 3),
    "rng": random.Random(1),
    "mine": PerRank([1, torch.zeros(2)]),
    "npr": np.random.default_rng(1),
    "legacy": np.random.RandomState(1),
    "gen": torch.Generator(),
}


def tree_seeds() -> list[bytes]:
    whole_state = json.dumps(encode_tree(STATE, "", CollectedTensors())).encode()
    small = {n: v for n, v in STATE.items() if n not in ("rng", "npr", "legacy", "gen")}
    singles = [
        json.dumps(encode_tree({n: v}, "", CollectedTensors())).encode() for n, v in STATE.items()
    ]
    return [
        whole_state[:1] + whole_state[1:],
        json.dumps(encode_tree(small, "", CollectedTensors())).encode(),
        *singles,
    ]


def tensor(name: str) -> torch.Tensor:
    return torch.zeros(2)


def take_tree(data: bytes) -> None:
    try:
        node = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(node, dict) and node.get("$") in (None, "dict"):
        with parsing("a tree"):
            check_tree(node)
        look_at(node)
    try:
        decode_tree(node, Decoding(tensor=tensor))
    except HpstoreError:
        return


def look_at(node: Any) -> None:  # Any: JSON
    """All that is done with a tree that was recorded. Each by itself: the first error ends one."""
    for look in (
        lambda: decode_tree(node, Decoding(tensor=tensor)),
        lambda: tensor_names(node),
        lambda: tensor_names(node, rank=0),
        lambda: [leaf.shown() for leaf in leaves(node)],
        lambda: list(paths(node)),
        lambda: of_rank(node, 0),
        lambda: only_branch(node),
        lambda: plain(node, tensor),
    ):
        try:
            look()
        except HpstoreError:
            continue


CHOICES = [
    LoadOptions(rename={"w": "v/w"}),
    LoadOptions(rename={"*": "x/*"}),
    LoadOptions(rename={"model/*": "net/*", "model/b": None}),
    LoadOptions(rename=lambda name: name.replace("o/", "p/")),
    LoadOptions(include=["w", "model"]),
    LoadOptions(exclude=["o", "*/state/a"]),
]


def choice_seeds() -> list[bytes]:
    model = {"a": torch.ones(2), "b": torch.ones(2)}
    named = {"state": {"a": {"m": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": ["a"]}]}
    numbered = {"state": {0: {"m": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    states: list[dict[str, Any]] = [
        {"model": model, "o": named},
        {"ema": model, "model": model, "o": named},
        {"o": numbered, "l": [{"model": model}]},
    ]
    found = [json.dumps(encode_tree(state, "", CollectedTensors())).encode() for state in states]
    return [*tree_seeds(), *found]


def take_choice(data: bytes) -> None:
    """Whatever a tree holds, choose() gives a part of it or says why not."""
    try:
        node = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(node, dict) or node.get("$") not in (None, "dict"):
        return
    with parsing("a tree"):
        check_tree(node)
    for load in CHOICES:
        try:
            choose(replace(small_manifest(), tree=node), load)
        except HpstoreError:
            continue


def manifest() -> Manifest:
    found = CollectedTensors()
    small = {n: STATE[n] for n in ("w", "n", "t", "k", "mine", "c")}
    tree = encode_tree(small, "", found)
    items, at = [], 0
    for name, one in found.tensors.items():
        shape = tuple(one.shape)
        nbytes = one.numel() * one.element_size()
        items.append(
            Item(
                name=name,
                dtype=str(one.dtype).removeprefix("torch."),
                shape=shape,
                box=whole(shape),
                offset=at,
                length=nbytes,
                digest="0" * 32,
            )
        )
        at += nbytes
    frames = Item(
        name="z",
        dtype="uint8",
        shape=(FRAME_BYTES + 5,),
        box=whole((FRAME_BYTES + 5,)),
        offset=at,
        length=45,
        digest="0" * 32,
        codec="zstd",
        frames=(40, 5),
    )
    halves = [
        Item(
            name="h",
            dtype="float32",
            shape=(4, 2),
            box=whole((2, 2)).moved((n, 0)),
            offset=at + 45,
            length=16,
            digest="",
        )
        for n in (0, 2)
    ]
    return Manifest(
        step=7,
        created_ms=1_700_000_000_000,
        items=(*items, frames, *halves),
        tree=tree,
        world=2,
        session="s",
        segments=(Segment(key="r/step-7/segment-0-r0", size=4096, version="v"),),
        extra={"metrics": {"loss": 1.5}, "lineage": {"from": "x"}},
    )


def small_manifest() -> Manifest:
    """With the bytes of its tensors behind it, as that of a small save."""
    base = manifest()
    data = np.zeros(4096, np.uint8)
    return replace(base, segments=(Segment(key="", size=4096, version="", data=data),))


def dcp_manifest() -> Manifest:
    base = manifest()
    nothing = CollectedTensors()
    names = [[name, "t"] for name in by_name(base.items)]
    extra = {
        "dcp": {
            "names": [*names[:-1], [names[-1][0], "b"]],
            "torch": "2.13",
            "version": "1.0.0",
            "planner_data": encode_tree({"a": ("x", 0)}, "", nothing),
        }
    }
    return Manifest(
        step=0,
        created_ms=1,
        items=base.items,
        tree={"$": "dcp"},
        segments=base.segments,
        extra=extra,
    )


def first_format() -> bytes:
    return seal(
        {
            "format": 1,
            "step": 3,
            "created_ms": 5,
            "segments": [["k", 64, "v"]],
            "items": [["w", "float32", [2, 3], 0, 24, "0" * 32]],
            "tree": {"w": {"$": "tensor", "item": "w"}},
        }
    )


def manifest_body(data: bytes) -> list[bytes]:
    if not data.startswith(MAGIC):
        body = json.loads(data)
        body.pop("digest")
        return [json.dumps(body).encode()]
    line, _, text = data.partition(b"\n")
    if line[len(MAGIC) : len(MAGIC) + 1] == b"3":
        length = int(line.split(b" ")[-1])
        return [text[:length], text[length:]]
    return [text]


def manifest_sealed(parts: Sequence[bytes]) -> bytes:
    if b'"items":{' in parts[0].replace(b" ", b""):
        digest = digest128(parts[0]).hex()
        if len(parts) == 1:
            return MAGIC + f"2 {digest}\n".encode() + parts[0]
        return b"".join((MAGIC, f"3 {digest} {len(parts[0])}\n".encode(), *parts))
    return seal(json.loads(parts[0]))


def take_manifest(data: bytes) -> None:
    needs_more(data[:200])
    Manifest.decode(data, where="x", facts_only=True)
    found = Manifest.decode(data, where="x")
    dict(found.metrics)
    assert all(type(v) in (int, float) for v in found.metrics.values())
    if found.tree.get("$") != "dcp":
        look_at(found.tree)
    for name, items in by_name(found.items).items():
        shape = items[0].shape
        if 0 < np.prod([float(n) for n in shape]) <= LARGE and hasattr(torch, items[0].dtype):
            dtype = getattr(torch, items[0].dtype)
            if isinstance(dtype, torch.dtype):
                take_reads(name, torch.empty(shape, dtype=dtype), items)
    try:
        torch_metadata(found, where="a/b", load_id="x")
    except HpstoreError:
        return


def take_reads(name: str, target: torch.Tensor, items: Sequence[Item]) -> None:
    try:
        reads = [read for chunk in chunks_of(name, target) for read in reads_for(chunk, items)]
    except HpstoreError:
        return
    scatter = SegmentReads(reads)
    rng = np.random.default_rng(0)
    try:
        for low, high in scatter.ranges[:8]:
            scatter.deliver(low, rng.integers(0, 255, min(high - low, 1 << 16), np.uint8))
    except HpstoreError:
        return


def frame_seeds() -> list[bytes]:
    raw = np.tile(np.arange(256, dtype=np.uint8), 16)
    return [bytes([n]) + encoder(name)(raw, 4) for n, name in enumerate(_CODECS[:3])]


_CODECS = ("lz4", "zstd", "shuffle-lz4", "none")


def take_frame(data: bytes) -> None:
    if len(data) > 1:
        decode(_CODECS[data[0] % 4], np.frombuffer(data[1:], np.uint8), np.empty(4096, np.uint8))


COMMITTED = "0000018bcfe56800-0123456789abcdef"
ROLLBACK = Rollback(
    name="0123456789abcdef", step=6, hidden=(7, 9), created_ms=1_700_000_000_000, until_ms=1 << 41
)


def attempt() -> bytes:
    return SaveAttempt(
        step=5,
        nonce="ab",
        host="h",
        boot="b",
        pid=4,
        namespace="n",
        started_ms=9,
        references=("a/b",),
    ).encode()


def take_json(data: bytes, run: Any) -> None:  # Any: a parser of decoded JSON
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return
    run(body)


VOTE = {
    "stages": [0, 1],
    "step": 4,
    "weights": 4,
    "microbatches": 8,
    "loader": None,
    "ledger": {"samples": 5, "digest": "00ff"},
}
LOADER = {
    "version": 1,
    "fingerprints": ["a"],
    "order": '{"kind": "x"}',
    "seed": 1,
    "epoch": 0,
    "samples": 4,
}


def take_loader_state(data: bytes) -> None:
    def run(body: Any) -> None:  # Any: JSON
        if isinstance(body, dict):
            found = LoaderState.from_dict(body)
            found.require_same_run(fingerprints=["a"], order='{"kind": "x"}', seed=1, length=9)

    take_json(data, run)


def take_listing(data: bytes) -> None:
    sort_out("r", data.decode(errors="replace").split("\n"))


CHECKPOINT_TARGETS = [
    Target(name="checkpoint-tree", run=take_tree, seeds=tree_seeds),
    Target(name="checkpoint-choice", run=take_choice, seeds=choice_seeds),
    Target(
        name="checkpoint-manifest",
        run=take_manifest,
        take_apart=manifest_body,
        put_together=manifest_sealed,
        seeds=lambda: [
            manifest().encode(),
            small_manifest().encode(),
            dcp_manifest().encode(),
            first_format(),
        ],
    ),
    Target(name="checkpoint-frame", run=take_frame, seeds=frame_seeds),
    Target(
        name="checkpoint-names",
        run=take_listing,
        seeds=lambda: [
            b"r/step-000000000007/manifest\nr/step-000000000007/segment-0a-r00000-p0001\n"
            b"r/attempts/000000000007-0a\nr/condemned/000000000007-0a"
        ],
    ),
    record("attempt", lambda: [attempt()], lambda data: SaveAttempt.decode(data, where="x")),
    record(
        "rollback",
        lambda: [ROLLBACK.encode(), replace(ROLLBACK, protections={"best": 7}).encode()],
        lambda data: Rollback.decode(data, where="x"),
    ),
    record(
        "watch-cursor",
        lambda: [
            CursorRecord(done=None, watcher="0a").encode(),
            CursorRecord(done=Commit(step=7, version=COMMITTED), watcher="0a").encode(),
        ],
        lambda data: CursorRecord.decode(data, where="x"),
    ),
    record(
        "protection",
        lambda: [seal({"format": 1, "step": 5})],
        lambda data: decode_protection(data, where="x"),
    ),
    record(
        "named",
        lambda: [Named(name="a", number=4).encode()],
        lambda data: Named.decode(data, where="x"),
    ),
    Target(
        name="rank-message",
        run=of_bytes,
        seeds=lambda: [to_bytes({"w": torch.ones(2, 3), "n": (1, 2)})],
    ),
    Target(
        name="pipeline-vote",
        seeds=lambda: [json.dumps(VOTE).encode()],
        run=lambda data: take_json(data, Vote.from_dict),
    ),
    Target(
        name="pipeline-ledger",
        seeds=lambda: [json.dumps(VOTE["ledger"]).encode()],
        run=lambda data: take_json(data, Ledger.from_dict),
    ),
    Target(name="loader-state", seeds=lambda: [json.dumps(LOADER).encode()], run=take_loader_state),
]
