"""PoolCheckpointIO under the real Lightning: fit, kill, resume, top-k, last, errors."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import hpstore
from hpstore.errors import CheckpointError, TooFewDevices
from hpstore.pool.pool import Pool
from hpstore.trainers.checkpoint_paths import path_of
from tests.integration.cli_cases import Cli

lightning = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

from hpstore.trainers.lightning import PoolCheckpointIO  # noqa: E402

pytestmark = [
    # two cores: Lightning wishes for more workers and for a GPU that may be there
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    # Lightning 2.6 still uses what torch 2.13 has renamed
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning"),
    # a run of its own in the same directory is what these tests are about
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


class Tiny(lightning.LightningModule):  # type: ignore[misc,name-defined]
    """A regression with dropout-free layers, AdamW and a schedule; `width` is a hyper-parameter."""

    def __init__(self, width: int = 8, note: object = "plain") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1)
        )
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.losses.append(float(loss.detach()))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def batches() -> torch.utils.data.DataLoader[torch.Tensor]:
    rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(list(rows), batch_size=4)  # type: ignore[arg-type]


def trainer(io: PoolCheckpointIO, folder: Path, *callbacks: object, epochs: int = 4) -> Any:
    return lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        plugins=[io],
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        default_root_dir=folder,
        log_every_n_steps=1,
    )


def same(one: Any, two: Any) -> bool:
    """Equal nested values, tensors bit by bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and torch.equal(one, two) and one.dtype == two.dtype
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[k], two[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(same(a, b) for a, b in zip(one, two, strict=True))
    return bool(one == two)


def test_a_resumed_fit_is_the_fit_that_was_never_stopped(pool: Pool, tmp_path: Path) -> None:
    """Two of four epochs, the local disk lost, resume: same losses, weights and optimizer."""
    torch.manual_seed(5)
    start = Tiny().state_dict()
    whole, first, second = Tiny(), Tiny(), Tiny()
    whole.load_state_dict(start)
    first.load_state_dict(start)
    with pool:
        straight = trainer(PoolCheckpointIO(pool, "whole"), tmp_path / "a")
        straight.fit(whole, batches())
        trainer(PoolCheckpointIO(pool, "run"), tmp_path / "b", epochs=2).fit(first, batches())
        for marker in (tmp_path / "b").rglob("*.ckpt"):
            marker.unlink()
        io = PoolCheckpointIO(pool, "run")
        again = trainer(io, tmp_path / "b")
        again.fit(second, batches(), ckpt_path=io.latest())
        assert (again.current_epoch, again.global_step) == (4, 24)
        assert first.losses + second.losses == whole.losses
        assert same(second.state_dict(), whole.state_dict())
        assert same(again.optimizers[0].state_dict(), straight.optimizers[0].state_dict())
        ours = again.lr_scheduler_configs[0].scheduler.state_dict()
        assert same(ours, straight.lr_scheduler_configs[0].scheduler.state_dict())


class Killer(lightning.Callback):  # type: ignore[misc,name-defined]
    """Kills its own process after step 15, while the save of that step is on its way."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 15:
            os.kill(os.getpid(), signal.SIGKILL)


def run_until_killed(folder: Path) -> None:
    """In another process: a save after every third step, then the end."""
    torch.manual_seed(5)
    model = Tiny()
    with hpstore.open(folder / "pool.toml") as pool:
        io = PoolCheckpointIO(pool, "run")
        keep = ModelCheckpoint(folder / "c", every_n_train_steps=3, save_top_k=1)
        run = trainer(io, folder, keep, Killer())
        # checkpoint callbacks come last: the killer must come after them
        run.callbacks.sort(key=lambda callback: isinstance(callback, Killer))
        run.fit(model, batches())


def test_a_killed_fit_resumes_from_a_whole_checkpoint(pool: Pool, tmp_path: Path) -> None:
    """SIGKILL in mid-save: a whole checkpoint is found, and the same losses follow from it."""
    pool.close()
    child = multiprocessing.get_context("spawn").Process(target=run_until_killed, args=(tmp_path,))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    torch.manual_seed(5)
    whole, again = Tiny(), Tiny()
    with hpstore.open(tmp_path / "pool.toml") as opened:
        io = PoolCheckpointIO(opened, "run")
        newest = io.latest()
        assert newest is not None
        done = io.load_checkpoint(newest)["global_step"]
        assert done in (12, 15)
        trainer(PoolCheckpointIO(opened, "whole"), tmp_path / "w").fit(whole, batches())
        keep = ModelCheckpoint(tmp_path / "c", every_n_train_steps=3, save_top_k=1)
        trainer(io, tmp_path, keep).fit(again, batches(), ckpt_path=newest)
    assert again.losses == whole.losses[done:]


def test_the_loaded_checkpoint_is_lightnings_own(pool: Pool, tmp_path: Path) -> None:
    """Against torch.save of the same dict: every key, callback state, loop and hyper-parameter."""
    with pool:
        io = PoolCheckpointIO(pool, "run")
        run = trainer(io, tmp_path, epochs=1)
        run.fit(Tiny(width=6), batches())
        dumped = run._checkpoint_connector.dump_checkpoint(False)
        io.save_checkpoint(dumped, tmp_path / "x.ckpt")
        torch.save(dumped, tmp_path / "stock.pt")
        loaded = io.load_checkpoint(tmp_path / "x.ckpt")
        assert same(loaded, torch.load(tmp_path / "stock.pt", weights_only=False))
        assert loaded["hyper_parameters"] == {"width": 6, "note": "plain"}
        assert {"loops", "callbacks", "optimizer_states", "lr_schedulers"} <= loaded.keys()


def test_top_k_keeps_k_and_last_is_found(pool: Pool, tmp_path: Path) -> None:
    """save_top_k=2 with save_last: three names stay in the pool, and "last" resumes from one."""
    with pool:
        io = PoolCheckpointIO(pool, "run")
        keep = ModelCheckpoint(tmp_path / "c", monitor="loss", save_top_k=2, save_last=True)
        run = trainer(io, tmp_path, keep, epochs=5)
        run.fit(Tiny(), batches())
        wanted = {*keep.best_k_models, keep.last_model_path}
        assert len(wanted) == 3
        assert {path_of(name, None) for name in io.checkpoints.names()} == wanted
        assert {str(path) for path in (tmp_path / "c").iterdir()} == wanted
        assert len(io.checkpoints._checkpoints.steps()) == 3
        assert pool.list("run/doubtful/") == []
        later = trainer(PoolCheckpointIO(pool, "run"), tmp_path, keep, epochs=6)
        model = Tiny()
        later.fit(model, batches(), ckpt_path="last")
        assert len(model.losses) == 6
        assert later.current_epoch == 6


def test_best_is_loaded_for_validation_after_fit(pool: Pool, tmp_path: Path) -> None:
    """ckpt_path="best" after teardown: the checkpoint of the lowest loss comes from the pool."""

    class Checked(Tiny):
        def test_step(self, batch: torch.Tensor, index: int) -> None:
            self.seen = self.net.state_dict()["0.weight"].clone()

    with pool:
        io = PoolCheckpointIO(pool, "run")
        keep = ModelCheckpoint(tmp_path / "c", monitor="loss", save_top_k=1)
        run = trainer(io, tmp_path, keep)
        model = Checked()
        run.fit(model, batches())
        run.test(model, batches(), ckpt_path="best", verbose=False)
        best = io.load_checkpoint(keep.best_model_path)["state_dict"]["net.0.weight"]
        assert torch.equal(model.seen, best)


def test_a_second_run_in_the_directory_does_not_overwrite(pool: Pool, tmp_path: Path) -> None:
    """The same file name again: Lightning sees the marker and counts versions, as on a disk."""
    with pool:
        for _ in range(2):
            keep = ModelCheckpoint(tmp_path / "c", filename="{epoch}")
            trainer(PoolCheckpointIO(pool, "run"), tmp_path, keep, epochs=1).fit(Tiny(), batches())
        names = PoolCheckpointIO(pool, "run").checkpoints.names()
        assert [Path(name).name for name in names] == ["epoch=0.ckpt", "epoch=0-v1.ckpt"]


def test_the_marker_stands_before_the_save_is_durable(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning asks for the path before its next save: it is there as soon as save returns."""
    go, put = threading.Event(), Pool.put

    def held(self: Pool, key: str, *args: Any, **options: Any) -> Any:
        if "/saves/" in key and "/manifest" in key:
            go.wait(60)
        return put(self, key, *args, **options)

    monkeypatch.setattr(Pool, "put", held)
    with pool:
        io = PoolCheckpointIO(pool, "run")
        io.save_checkpoint({"step": 1}, tmp_path / "c" / "x.ckpt")
        assert (tmp_path / "c" / "x.ckpt").is_file()
        assert io.checkpoints.names() == []
        go.set()
        io.teardown()
        assert len(io.checkpoints.names()) == 1


def test_last_as_a_link_resumes(pool: Pool, tmp_path: Path) -> None:
    """save_last="link": the link leads from marker to marker, and to the right checkpoint."""
    with pool:
        io = PoolCheckpointIO(pool, "run")
        keep = ModelCheckpoint(tmp_path / "c", save_last="link", save_top_k=1)
        trainer(io, tmp_path, keep, epochs=2).fit(Tiny(), batches())
        assert (tmp_path / "c" / "last.ckpt").is_symlink()
        assert io.load_checkpoint(tmp_path / "c" / "last.ckpt")["global_step"] == 12
        assert len(io.checkpoints.names()) == 1


class Terminate(lightning.Callback):  # type: ignore[misc,name-defined]
    """SIGTERM after step 8, in the middle of an epoch; what Lightning makes of it."""

    saw = ""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 8:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_exception(self, trainer: Any, module: Any, error: BaseException) -> None:
        self.saw = type(error).__name__


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
def test_sigterm_is_lightnings_own_and_loses_no_step(pool: Pool, tmp_path: Path) -> None:
    """pl1 sigterm latest: io.latest() before fit() had SIGTERM end the process in mid batch. With
    save_on_exception the step of the signal is saved, durably, and the next job goes on there."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pool:
            io = PoolCheckpointIO(pool, "run")
            assert io.latest() is None
            keep = ModelCheckpoint(
                tmp_path / "c", save_on_exception=True, every_n_epochs=9, save_last="link"
            )
            end = Terminate()
            with pytest.raises(SystemExit):
                trainer(io, tmp_path, keep, end).fit(Tiny(), batches(), ckpt_path=io.latest())
            assert end.saw == "SIGTERMException"
            newest = io.latest()
            assert newest is not None
            assert newest.endswith("step=8.ckpt")
            io.close()
            other = PoolCheckpointIO(pool, "run")
            again = trainer(other, tmp_path, copy.deepcopy(keep))
            again.fit(Tiny(), batches(), ckpt_path=other.latest())
            assert again.global_step == 24
            other.close()
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_checkpoint_can_be_a_file_for_code_that_opens_paths(pool: Pool, tmp_path: Path) -> None:
    """load_from_checkpoint and torch.load open the path, where a marker stands: files=True writes
    the checkpoint there; io.file() gives one without it. The pool stays the truth."""
    with pool:
        io = PoolCheckpointIO(pool, "run", files=True)
        keep = ModelCheckpoint(tmp_path / "c", monitor="loss", save_top_k=1, save_last="link")
        model = Tiny(width=5)
        trainer(io, tmp_path, keep, epochs=2).fit(model, batches())
        path = keep.last_model_path
        assert same(Tiny.load_from_checkpoint(path).state_dict(), model.state_dict())
        assert torch.load(path, weights_only=True)["global_step"] == 12
        assert not list(tmp_path.rglob("*.part"))
        Path(os.path.realpath(path)).write_text("nothing")
        found = Tiny.load_from_checkpoint(io.file(path))
        assert found.hparams.width == 5
        assert same(found.state_dict(), model.state_dict())
        io.close()


def test_a_file_is_one_call_of_torch_save_on_an_open_file(pool: Pool, tmp_path: Path) -> None:
    """Code that takes torch.save's place (Lightning's tests count its calls) need not make a file
    of its own for the checkpoint to stand; storage_options are a TypeError, as in Lightning."""
    with pool:
        io = PoolCheckpointIO(pool, "run", files=True)
        path = tmp_path / "c" / "one.ckpt"
        with mock.patch("torch.save") as saved:
            io.save_checkpoint({"step": 3}, path)
        assert saved.call_count == 1
        assert path.is_file()
        assert [file.name for file in path.parent.iterdir()] == ["one.ckpt"]
        with pytest.raises(TypeError, match="storage_options"):
            io.save_checkpoint({"step": 4}, path, storage_options={"token": "x"})
        assert io.load_checkpoint(path) == {"step": 3}
        io.close()


def test_ls_shows_lightnings_steps_and_names(
    pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It showed the numbers of the saves, and nothing under the prefix that the trainer has."""
    with pool:
        io = PoolCheckpointIO(pool, "run", root=tmp_path)
        keep = ModelCheckpoint(tmp_path / "c", save_top_k=-1)
        trainer(io, tmp_path, keep, epochs=2).fit(Tiny(), batches())
        io.close()
        cli, toml = Cli(tmp_path, capsys), tmp_path / "pool.toml"
        rows = json.loads(cli.run("checkpoint", "ls", toml, "run", "--json"))
        assert [row["global_step"] for row in rows] == [6, 12]
        assert [row["name"] for row in rows] == [
            "under/c/epoch=0-step=6.ckpt",
            "under/c/epoch=1-step=12.ckpt",
        ]
        _, headings, _, first, *_ = cli.run("checkpoint", "ls", toml, "run").splitlines()
        assert re.findall(r"\w+", headings)[:3] == ["step", "name", "save"]
        assert "under/c/epoch=0-step=6.ckpt" in first
        assert "all as saved" in cli.run("checkpoint", "verify", toml, "run")


def test_an_object_is_refused_by_its_key(pool: Pool, tmp_path: Path) -> None:
    """A pattern among the hyper-parameters, a module: the error names them, nothing is written."""
    with pool:
        io = PoolCheckpointIO(pool, "run")
        with pytest.raises(CheckpointError, match=r"hyper_parameters/note' is a re\.Pattern"):
            trainer(io, tmp_path, epochs=1).fit(Tiny(note=re.compile("a+")), batches())
        with pytest.raises(CheckpointError, match=r"checkpoint\['a'\]\[0\] is a torch.nn"):
            io.save_checkpoint({"a": [torch.nn.Linear(1, 1)]}, "x.ckpt")
        assert io.checkpoints.names() == []


def test_a_failed_save_is_raised_and_removes_nothing(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second save fails in the background: its error comes at teardown, the first stays."""
    with pool:
        io = PoolCheckpointIO(pool, "run")
        io.save_checkpoint({"step": 1}, tmp_path / "one.ckpt")
        io.teardown()
        put = Pool.put

        def failing(self: Pool, key: str, *args: Any, **options: Any) -> Any:
            if "/step-" in key:
                raise TooFewDevices("no devices today")
            return put(self, key, *args, **options)

        monkeypatch.setattr(Pool, "put", failing)
        io.save_checkpoint({"step": 2, "w": torch.ones(2)}, tmp_path / "two.ckpt")
        io.remove_checkpoint(tmp_path / "one.ckpt")
        with pytest.raises(TooFewDevices, match="today"):
            io.teardown()
        monkeypatch.undo()
        assert io.load_checkpoint(tmp_path / "one.ckpt") == {"step": 1}
        with pytest.raises(CheckpointError, match="no checkpoint"):
            io.load_checkpoint(tmp_path / "two.ckpt")
        io.save_checkpoint({"step": 3}, tmp_path / "three.ckpt")
        io.teardown()
        assert [Path(name).name for name in io.checkpoints.names()] == ["three.ckpt"]
