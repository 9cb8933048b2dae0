"""The data of one rank's stages, step by step: inputs for the first stage, targets for the last."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from hpstore.errors import ConfigError
from hpstore.loaders import DataLoader
from hpstore.trainers.pipelining.consumed_samples import Span
from hpstore.trainers.pipelining.micro_batch_feed import (
    Fed,
    Feed,
    Keywords,
    Pick,
    as_arguments,
    joined,
    keywords_of,
    picked,
    require_alike,
    shapes_of,
)
from hpstore.trainers.pipelining.torch_internals import Lazily, StepInputs

STEPS_READY = 2  # steps whose micro-batches may lie ready: the one that runs and the next


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumed:
    """What one step has used up. `after`: the loader's state behind it; None without data."""

    spans: tuple[Span, ...] = ()
    ready: tuple[float, ...] = ()
    after: dict[str, Any] | None = None


class Supply:
    """Feeds a step. A step that fails leaves its micro-batches to the next one, which is then the
    same step again. `first`, `last`: whether the rank holds that stage; with neither, and without
    `keywords`, which every stage gets, it is empty."""

    def __init__(
        self,
        loader: DataLoader | None,
        *,
        first: bool,
        last: bool,
        inputs: Pick,
        target: Pick,
        keywords: Keywords = None,
    ) -> None:
        self._loader = loader
        self.first, self.last = first, last
        self._inputs, self._target, self._keywords = inputs, target, keywords
        self._feed: Feed | None = None
        self._stands: dict[str, Any] | None = None  # the loader's state behind what is consumed
        self._stuck = False
        self._count = 0
        self._late = set[int]()
        self.wait_seconds = 0.0  # of the step
        self.fault: Exception | None = None  # of the step: why a micro-batch was not to be had

    @property
    def fed(self) -> bool:
        """Whether this rank reads data."""
        return self.first or self.last or self._keywords is not None

    def position(self) -> dict[str, Any] | None:
        """The loader's state before the first step; None where no data are read."""
        return self._loader.state_dict() if self._loader is not None and self.fed else None

    @property
    def late_microbatches(self) -> int:
        """Of this step: those that were waited for."""
        return len(self._late)

    @property
    def picks(self) -> tuple[Pick, Pick, Keywords]:
        """What is taken of a batch: inputs, target, keywords."""
        return self._inputs, self._target, self._keywords

    @property
    def keyword_names(self) -> set[str]:
        """As far as they are known before a batch is there."""
        return set(self._keywords) if isinstance(self._keywords, Mapping) else set()

    def require_even(self) -> None:
        """Raise ConfigError where the last micro-batch of an epoch is smaller than the others."""
        slices = None if self._loader is None or not self.fed else self._loader.slices
        if slices is None or slices.length < slices.global_batch:
            return
        rows = slices.last_rows()
        if rows % slices.global_batch:
            raise ConfigError(
                f"the last micro-batch of an epoch would have {rows} of {slices.global_batch} "
                "samples, and a schedule takes equal ones only. Give the loader drop_last=True. "
                "Nothing was trained."
            )

    def begin(self, count: int) -> None:
        """A step of so many micro-batches; as many more are fetched while it runs. After an error
        of the loader it is asked again, from where the run stands."""
        self._count, self._late, self.wait_seconds, self.fault = count, set(), 0.0, None
        if not self.fed or self._loader is None:
            return
        if self._feed is not None and self._feed.failed:
            self.close()
        if self._feed is None:
            self._require_own_loader()
            self._stands = self._loader.state_dict()
            self._feed = Feed(self._loader, ahead=STEPS_READY * count)
        self._feed.keep_ready(STEPS_READY * count)
        self._feed.start()

    def _look(self, index: int) -> Fed:
        assert self._feed is not None
        fed, waited = self._feed.look(index)
        if waited > 1e-4:  # below it is the lock's own time
            self._late.add(index)
        self.wait_seconds += waited
        return fed

    def arguments(self, index: int) -> tuple[Any, ...]:
        """Of one micro-batch, for the first stage. Raises what the loader raised."""
        return as_arguments(picked(self._look(index).batch, self._inputs))

    def target(self, index: int) -> Any:
        """Of one micro-batch, for the last stage. Raises what the loader raised."""
        return picked(self._look(index).batch, self._target)

    def keywords(self, index: int) -> dict[str, Any]:
        """Of one micro-batch, for each stage. Raises what the loader raised."""
        return keywords_of(self._look(index).batch, self._keywords)

    def given(self, *, lazy: bool) -> StepInputs:
        """The data of this step, (), None where none are needed. Raises what the loader raised.

        With `lazy` lists that wait for each micro-batch when it is needed, but for the first. Once
        the schedule runs, peers wait for what comes of each: where one cannot be had, the first
        stands in for it, and `fault` says why. The step is then void.
        """
        if not lazy:
            numbers = range(self._count)
            arguments = joined([self.arguments(n) for n in numbers], "inputs") if self.first else ()
            target = joined([self.target(n) for n in numbers], "targets") if self.last else None
            found: dict[str, Any] = {}
            if self._keywords is not None:
                each = [self.keywords(n) for n in numbers]
                found = {name: joined([one[name] for one in each], name) for name in each[0]}
            return StepInputs(arguments, target, keywords=found)
        parts: list[Lazily | None] = []
        keyed = self._keywords is not None
        for wanted, make in (
            (self.first, self.arguments),
            (self.last, self.target),
            (keyed, self.keywords),
        ):
            part = Lazily(self._count, partial(self._or_stand_in, make, [])) if wanted else None
            if part is not None:
                part[0]
            parts.append(part)
        return StepInputs(parts[0], parts[1], lazy=True, keywords=parts[2])

    def _or_stand_in(self, make: Callable[[int], Any], shapes: list[Any], index: int) -> Any:
        """`shapes`: empty, then those of the first one."""
        if not index:
            found = make(0)
            shapes.append(shapes_of(found))
            return found
        try:
            found = make(index)
            require_alike(shapes[0], found)
        except Exception as error:  # noqa: BLE001 (raised by the step, on all ranks)
            self.fault = self.fault or error
            return make(0)
        return found

    def finish(self) -> Consumed:
        """The step is done: its micro-batches are consumed."""
        if self._feed is None:
            return Consumed()
        used = [self._feed.look(n)[0] for n in range(self._count)]
        self._feed.drop(self._count)
        self._stands = used[-1].after
        return Consumed(
            spans=tuple(fed.span for fed in used),
            ready=tuple(fed.ready for fed in used),
            after=used[-1].after,
        )

    def go_to(self, state: Mapping[str, Any] | None) -> None:
        """Go on at a saved position of the loader; what was fetched ahead is forgotten. Raises
        ConfigError for a state of another run, and when the loader hangs."""
        self.close()
        if self.fed and self._loader is not None and state is not None:
            self._require_own_loader()
            self._loader.load_state_dict(state)

    def close(self) -> None:
        """Stop fetching. The loader stands behind what was consumed, where another begin() goes on;
        where it was until now when it hangs (logged). Idempotent."""
        feed, self._feed = self._feed, None
        if feed is None:
            return
        feed.close()
        self._stuck = feed.stuck
        if self._loader is not None and self._stands is not None and not feed.stuck:
            self._loader.load_state_dict(self._stands)

    def _require_own_loader(self) -> None:
        """A thread that a hanging loader has kept would take micro-batches that nobody sees."""
        if self._stuck:
            raise ConfigError(
                "the loader hangs in an earlier fetch, so its position is not known any more. What "
                "was committed is untouched: end this process, the next one goes on from there."
            )
