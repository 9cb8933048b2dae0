"""A drop-in DataLoader: native datasets are read by threads, others by torch's own machinery."""

from __future__ import annotations

import copy
import inspect
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch.utils.data

from hpstore.errors import ConfigError
from hpstore.loaders.batching.batch_counters import Waits
from hpstore.loaders.batching.chosen_data import chosen_data, decoder_of, order_for
from hpstore.loaders.batching.direct_conditions import direct_access, why_no_direct
from hpstore.loaders.batching.engines import AnyEngine, fingerprints, make_engine
from hpstore.loaders.batching.loader_options import GpuTransfer, LoaderMemory
from hpstore.loaders.batching.native_iterator import BatchRun, EndIterator, NativeIterator
from hpstore.loaders.batching.packing import Packing
from hpstore.loaders.batching.postprocess import Finish
from hpstore.loaders.batching.rank_sampler import (
    RankSampler,
    agree_on_epoch,
    asked_epoch,
    show_sampler,
)
from hpstore.loaders.batching.torch_arguments import (
    T_co,
    asked_processes,
    copied_cache,
    kept_names,
    native_options,
    require_arguments,
)
from hpstore.loaders.batching.torch_iterator import (
    PositionSampler,
    begin,
    described,
    reference,
    refuse_ours,
)
from hpstore.loaders.batching.torch_run_state import Companions, Skipping
from hpstore.loaders.cache import Cache
from hpstore.loaders.dataset.image_decode import Decode
from hpstore.loaders.dataset.row_filter import RowFilter
from hpstore.loaders.gpu.gpu_device import Gpu
from hpstore.loaders.sampling.data_parallel import RankShares
from hpstore.loaders.sampling.loader_state import LoaderState, order_text
from hpstore.loaders.sampling.loop_position import LoaderPosition
from hpstore.loaders.sampling.order import Order
from hpstore.loaders.sampling.rank_slices import Slices, Tail

_log = logging.getLogger(__name__)


# Any below: torch's own signature is untyped here
class DataLoader(torch.utils.data.DataLoader[T_co]):
    """torch's DataLoader with a state, made for hpstore's datasets; others work too.

    iter() goes on at a loaded position once, else starts the next epoch; behind the last batch of
    one it yields nothing, so that the loop that was cut there ends. state_dict() counts what was
    handed out, not what was read ahead; it fits another world size, other workers.

    Parameters
    ----------
    dataset
        A hpstore Dataset, a Subset or random_split of one (then batches are dicts of tensors, read
        by threads), or any torch dataset (then torch's workers and collation).
    batch_size, shuffle
        Samples a batch, on each rank.
        False or "none", True or "global" (a permutation), "window" (of stripes, then of the samples
        of a window of them: sequential reads, for data larger than memory), or an Order.
    num_workers, multiprocessing_context
        Threads of a native dataset; with a context also processes for your functions.
    seed, sampler, batch_sampler, pin_memory, drop_last, timeout, worker_init_fn, generator
    prefetch_factor, persistent_workers, pin_memory_device, in_order, snapshot_every_n_steps
        As torch and torchdata have them, but that `seed`, not a generator, decides the order. What
        an explicit sampler chooses, or an IterableDataset, is never sharded.
    rank, world_size, mesh, shard
        Data-parallel coordinates, by default those of torch.distributed, or a DeviceMesh; with
        shard=False each rank reads everything.
    tail
        Of a short last global batch: "pad" (some samples of the epoch's beginning come twice),
        "drop" (a few less), "uneven" (for evaluation; ranks may differ by one step).
    device, gpu, layout, cache, memory
        Where batches arrive, and how; torch.jagged for ragged fields as nested tensors.
        Bytes for keeping pages in memory ("auto": a quarter of what is available; None or 0: none),
        or a Cache; memory for batches made ahead and for windows.
    transform, collate_fn, batch_transform
        Called with a sample, a list of them, a batch; the first and last also with a numpy
        generator keyed by (seed, epoch, position), where they take two arguments.
    packing, filter
        Documents of tokens become sequences of one length. A function of the columns gives a mask
        of the samples to read, or comparisons do that all must hold: [("label", "==", 3)].
    on_error, decode
        "raise", or "skip" samples that are damaged beyond repair (counted in stats()).
        True, an ImageDecode, or a dict of these by field: images come as tensors (docs/data.md).
    """

    # Accelerate then gives the loader back as it is, and saves its state with the rest
    _is_accelerate_prepared = True
    use_stateful_dataloader = True
    tail: Tail

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | str | Order | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Any = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Any = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        snapshot_every_n_steps: int | None = 1,
        seed: int = 0,
        device: str | torch.device | Gpu | None = None,
        layout: torch.layout | None = None,
        gpu: GpuTransfer = GpuTransfer(),  # noqa: B008 (frozen)
        cache: Cache | int | str | None = "auto",
        memory: LoaderMemory = LoaderMemory(),  # noqa: B008 (frozen)
        rank: int | None = None,
        world_size: int | None = None,
        mesh: Any = None,
        shard: bool = True,
        tail: Tail = "pad",
        transform: Any = None,
        batch_transform: Any = None,
        on_error: str = "raise",
        decode: Decode = None,
        packing: Packing | None = None,
        filter: RowFilter | None = None,  # noqa: A002 (as torch has names of builtins)
    ) -> None:
        self.shuffle, self.seed, self.device, self.layout = shuffle, seed, device, layout
        self.gpu, self.cache, self.memory, self.decode = gpu, cache, memory, decode
        self.rank, self.world_size, self.mesh, self.shard = rank, world_size, mesh, shard
        self.tail, self.snapshot_every_n_steps = tail, snapshot_every_n_steps
        self.transform, self.batch_transform, self.on_error = transform, batch_transform, on_error
        options = {
            "num_workers": num_workers,
            "collate_fn": collate_fn,
            "pin_memory": pin_memory,
            "timeout": timeout,
            "worker_init_fn": worker_init_fn,
            "generator": generator,
            "multiprocessing_context": multiprocessing_context,
            "drop_last": drop_last,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            "pin_memory_device": pin_memory_device,
            "batch_size": batch_size,
            "in_order": in_order,
        }
        self._begin(dataset, sampler, batch_sampler, packing, filter, options)

    def _begin(
        self, dataset: Any, sampler: Any, batch_sampler: Any, packing: Any, kept: Any, options: Any
    ) -> None:
        """Check, then make what the arguments ask for. `options`: those of torch's arguments."""
        self.packing, self.filter = packing, kept
        require_arguments(self, dataset, sampler, batch_sampler, options)
        self._by_user = sampler is not None or batch_sampler is not None
        self._native = chosen_data(dataset, self.filter, self.packing)
        self._processes = None if self._native is None else asked_processes(options)
        self._prepare(dataset, options["batch_size"], options["drop_last"])
        self.finish = self._make_finish(options["collate_fn"])
        self._start_torch(dataset, sampler, batch_sampler, options)

    def _make_finish(self, collate_fn: Any) -> Finish:
        self._collate_given = collate_fn  # torch puts its own in the place of None
        return Finish(
            collate_fn=collate_fn,
            transform=self.transform,
            seed=self.seed,
            batch_transform=self.batch_transform,
            device=self.device,
            on_error=self.on_error,
            layout=self.layout,
            processes=self._processes,
            decoder=decoder_of(self._native, self.decode),
            ring_bytes=int(self.gpu.ring_bytes),
        )

    def _prepare(self, dataset: Any, batch_size: int | None, drop_last: bool) -> None:
        """Order, slices and counters. Raises ConfigError."""
        self._grows = self._native is None and isinstance(self.shuffle, bool | str | None)
        self.order: Order | None = None
        self.shares: RankShares | None = None
        self.positions: PositionSampler | None = None
        if not self._by_user and not isinstance(dataset, torch.utils.data.IterableDataset):
            self._make_order(dataset, batch_size, drop_last)
        self.stands, self._companions = LoaderPosition(), Companions()
        self._others: Callable[[], Any] | None = None  # torch's iterator of the last loop
        self._told: int | None = None  # the epoch that the user's sampler was told
        self.to_skip = 0  # batches of the user's sampler, as the next loop begins
        self._state_text: tuple[tuple[str, ...], str] | None = None
        self.skipped_batches_total = 0  # read again to get to a position: see docs/data.md
        self.waits, self._engine_stats = Waits(), dict[str, Any]()  # of the one that was closed
        self._engine: AnyEngine | None = None
        self._engine_end: weakref.finalize[..., Any] | None = None
        self._ready: BatchRun | None = None  # made ahead for the next epoch
        self._forget_runs()

    def _make_order(self, dataset: Any, batch_size: int | None, drop_last: bool) -> None:
        """The order of the samples that there are now, and this rank's share of it."""
        window = self.memory.window()
        self.order = order_for(dataset, self._native, self.shuffle, self.seed, window)
        whole = Slices(
            length=self.order.length,
            batch_size=1 if batch_size is None else batch_size,
            drop_last=drop_last,
            tail=self.tail,
        )
        self.shares = RankShares(whole, self.rank, self.world_size, self.mesh, shard=self.shard)
        if self.positions is not None:
            self.positions.renew(self.order, self.shares)
        elif self._native is None:
            self.positions = PositionSampler(self.order, self.shares, single=batch_size is None)

    def follow_growth(self) -> None:
        """Somebody else's dataset may be longer than it was: its epochs are, then, too. Not in the
        middle of a loop, whose samples are of the order that it began with."""
        loop = self._others and self._others()
        if loop and loop.under_way:
            return
        data: Any = self.dataset
        if self._grows and self.order is not None and len(data) != self.order.samples:
            self._make_order(data, self.batch_size, self.drop_last)
            self._state_text = None

    def _start_torch(
        self, dataset: Any, sampler: Any, batch_sampler: Any, options: dict[str, Any]
    ) -> None:
        """torch's constructor; attributes keep what the user gave: wrappers rebuild from them."""
        given = dict(options)
        if self.layout is not None and options["pin_memory"]:
            raise ConfigError("layout with pin_memory: give device= instead, which needs none")
        if options["generator"] is not None and self.order is not None and self.shuffle:
            _log.warning("seed=, not the generator, decides the order of the samples")
        if self._native is not None:  # threads of ours, no workers of torch's
            options = native_options(options, called=self._processes is not None)
        if isinstance(dataset, torch.utils.data.IterDataPipe):
            options["shuffle"] = self.shuffle
        if self.positions is not None and options["batch_size"] is None:
            super().__init__(dataset, sampler=self.positions, **options)
        elif self.positions is not None or batch_sampler is not None:
            del options["batch_size"], options["drop_last"]
            batches = batch_sampler if self.positions is None else self.positions
            super().__init__(dataset, batch_sampler=batches, **options)
        else:
            super().__init__(dataset, sampler=sampler, **options)
        for name in kept_names(
            given, ours=self._native is not None, batches=batch_sampler is not None
        ):
            object.__setattr__(self, name, given[name])
        if self._processes is not None:
            self.multiprocessing_context = given["multiprocessing_context"]
        show_sampler(self, native=self._native is not None)
        if self._native is None:
            refuse_ours(self, inspect.signature(DataLoader.__init__).parameters)

    @property
    def slices(self) -> Slices | None:
        """How an epoch is dealt out; None where a sampler or an IterableDataset decides."""
        return None if self.shares is None else self.shares.now()

    def __iter__(self) -> Any:
        self._others = None  # the loop before is over
        self.follow_growth()
        stands = self.stands
        if not stands.begin(asked_epoch(self, self._told) if self._by_user else None):
            return EndIterator(self, stands.epoch - 1)
        slices = self.slices
        if self._by_user:
            self._told = stands.epoch = agree_on_epoch(self, stands.epoch, self._told)
        states = self._companions.begin(self, *self.standing())
        if self._native is None:
            made = begin(self, states, super().__iter__)
            self._others = reference(made)
            return made
        run, self._ready = self._ready, None
        if run is None or stands.position or not run.begins_at(slices, stands.epoch):
            run = BatchRun(self, self._native, *self.standing())
            self._runs.add(run)
            self._threads.update(run.threads)
        return NativeIterator(self, run, stands.epoch)

    def __len__(self) -> int:
        """Batches of an epoch on this rank."""
        self.follow_growth()
        return super().__len__() if self.slices is None else self.slices.own_steps()

    @property
    def _index_sampler(self) -> Any:
        """torch's iterators draw from it."""
        found = super()._index_sampler
        return Skipping(found, self) if self._by_user else found

    def _get_iterator(self) -> Any:
        found = self._companions.iterator(self)
        return super()._get_iterator() if found is None else found

    def standing(self) -> tuple[int, int]:
        """(epoch, position) that the run stands at; positions are samples of all ranks."""
        return self.stands.epoch, self.stands.position

    def keep_ready(self, run: BatchRun) -> None:
        """An iterator that has ended leaves what was made ahead of the next epoch."""
        self._ready = run

    def engine(self) -> AnyEngine:
        """What makes the batches of a native dataset in this process; made at first use."""
        assert self._native is not None
        if self._engine is None or self._engine.pid != os.getpid():
            self._engine = make_engine(
                self._native,
                self.order,
                memory=self.memory,
                cache=self.cache,
                batch_rows=self.batch_size or 1,
                pin=self.finish.begin(self.pin_memory),
                direct=direct_access(self.gpu, self.finish.gpu, self._no_direct()),
                share=self._native.share(self.slices),
            )
            self._let_engine_go()  # of a parent
            self._engine_end = weakref.finalize(self, self._engine.stop)
            self._engine_end.atexit = False
        return self._engine

    def _let_engine_go(self) -> None:
        if self._engine_end is not None:  # it keeps the memory of an engine that was closed
            self._engine_end.detach()
            self._engine_end = None

    def _no_direct(self) -> str:
        """Why no record may be read straight to the GPU, whatever the machine can; or ""."""
        on_host = self.finish.on_host or ("one by one" if self.batch_size is None else "")
        return why_no_direct(self.gpu, self.cache, self._native, on_host)

    def read_as(self, rank: int, world_size: int) -> None:
        """Take a data-parallel rank's share, before iterating. What the user has said stands.

        Parameters
        ----------
        rank, world_size
            Of the data-parallel ranks.
        """
        if not self.told_its_share and self.shares is not None:
            self.shares.tell(rank, world_size)

    @property
    def told_its_share(self) -> bool:
        """Whether the user has said which data-parallel rank this is (rank, mesh, shard=False)."""
        return self.rank is not None or self.mesh is not None or not self.shard

    def set_epoch(self, epoch: int) -> None:
        """The next iter() is of this epoch; where the run is in it already, it goes on there, if
        only to find its end.

        Parameters
        ----------
        epoch
            Counted from 0.
        """
        self.stands.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """A few integers and fingerprints: JSON. Below 50 us whatever the dataset."""
        if self._native is None and self.num_workers and not self.in_order:
            raise ConfigError(
                "with in_order=False batches come as workers finish them: there is no position "
                "to save. Nothing is lost; leave in_order out to have one."
            )
        prints, order = self._described()
        epoch, position, at_end = self.stands.saved()
        state = LoaderState(
            fingerprints=prints,
            order=order,
            seed=self.seed,
            epoch=epoch,
            samples=position,
            at_end=at_end,
        ).to_dict()
        if self.order is None or self._native is None:
            state |= self._companions.saved(self, epoch, position, self._others and self._others())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a saved position. Reads nothing. ConfigError when it is of another run.

        Parameters
        ----------
        state
            Of state_dict().
        """
        found = LoaderState.from_dict(state)
        prints, order = self._described()
        length = self.order.length if self.order is not None else 1 << 62
        found.require_same_run(fingerprints=prints, order=order, seed=self.seed, length=length)
        self._companions.load(self, state)
        self._iterator = None  # persistent workers are past what was saved
        self.stands.load(found.epoch, found.samples, at_end=found.at_end)

    def consumed(self, batches: int) -> None:
        """For wrappers that read ahead: so many more of the batches that were handed out count.

        From the first call on the state counts what was consumed; call it with 0 before reading.

        Parameters
        ----------
        batches
            That were consumed since the last call.
        """
        self.stands.consumed(batches)

    def _described(self) -> tuple[tuple[str, ...], str]:
        """Fingerprints of the data, and the order as text; made once."""
        if self._state_text is None:
            native = self._native
            size = self.order.samples if self.order is not None and self._grows else None
            prints = (
                (described(self.dataset, size),) if native is None else fingerprints(native.data)
            )
            text = order_text(self.order) if self.order is not None else '"the sampler\'s"'
            self._state_text = (prints, text)
        return self._state_text

    @property
    def wait_seconds(self) -> float:
        """How long next() waited for batches."""
        return self.waits.data_seconds

    def stats(self) -> dict[str, Any]:
        """Where the time went: see docs/data.md."""
        found = self.finish.stats() | self.waits.stats(self.finish.samples_total)
        if self.finish.gpu is not None and (reason := self._no_direct()):
            found["direct"] = {"state": "off", "reason": reason}
        found.update(self._engine_stats if self._engine is None else self._engine.stats())
        if isinstance(self.cache, Cache):
            found["cache"] = self.cache.stats()
        return found

    def __getstate__(self) -> dict[str, Any]:
        """For another process: what was asked for and where it stands, no threads, no memory."""
        state = self.__dict__ | {"stands": copy.deepcopy(self.stands)}
        for name in ("engine", "engine_end", "ready", "iterator", "runs", "threads"):
            state[f"_{name}"] = None
        state["finish"] = state["_others"] = None
        state["cache"] = copied_cache(self.cache)
        if isinstance(self.sampler, RankSampler):
            del state["sampler"]
            state.pop("batch_sampler" if self._native is not None else "", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.stands.copied()
        self.waits, self._engine_stats = Waits(), {}
        self.finish = self._make_finish(self._collate_given)
        self._forget_runs()
        show_sampler(self, native=self._native is not None)

    def _forget_runs(self) -> None:
        """None that this one must wait for when it is closed."""
        self._runs: weakref.WeakSet[BatchRun] = weakref.WeakSet()  # somebody may iterate over them
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # of dropped ones, too

    def close(self) -> None:
        """Stop all threads that read for it, and wait for them: its dataset may then be closed.

        Iterators under way then raise AlreadyClosed; another one starts threads again. Idempotent.
        """
        self._ready = None
        for run in list(self._runs):
            run.close()
        for thread in list(self._threads):
            thread.join()
        engine, self._engine = self._engine, None
        try:
            self.finish.close()
        finally:
            if engine is not None:
                engine.close()
                self._engine_stats = engine.stats()
            self._let_engine_go()
