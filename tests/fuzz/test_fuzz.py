"""Every parser of bytes that others may have written, with kept inputs and some mutated ones.

`make fuzz` runs as many as one likes. What it found is kept in corpus/, and runs here first.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import warnings

import pytest

from hpstore.errors import IntegrityError
from tests.fuzz.engine import CORPUS, Finding, Target, bounded, mutants, take
from tests.fuzz.mutation import MOST_BYTES, mutated
from tests.fuzz.targets import TARGETS
from tests.thorough import LONG

MUTANTS = 2000 if LONG else 150  # a target: a number, so that each run tries the same


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_parser_takes_any_bytes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Kept inputs, then some new ones: an HpstoreError or a value, in bounded memory."""
    target = TARGETS[name]
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"), bounded():
            for data in target.inputs():
                take(target, data)
            for data in itertools.islice(mutants(target, seed=1), MUTANTS):
                take(target, data)
    finally:
        logging.disable(logging.NOTSET)


def test_kept_inputs_belong_to_targets() -> None:
    """A renamed target would leave its corpus unused."""
    assert {folder.name for folder in CORPUS.iterdir()} <= set(TARGETS)


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_seeds_are_right(name: str) -> None:
    """Mutations begin at inputs that a parser takes as far as it goes: most without an error."""
    target = TARGETS[name]
    errors = 0
    for data in target.seeds():
        try:
            target.run(data)
        except IntegrityError:
            errors += 1
    assert errors == 0


def broken(kind: type[BaseException]) -> Target:
    def run(data: bytes) -> None:
        if data:
            raise kind("no")

    return Target(name="broken", run=run, seeds=lambda: [b"abc"])


@pytest.mark.parametrize("kind", [KeyError, MemoryError, RecursionError, SystemError])
def test_an_error_that_is_not_ours_is_a_finding(kind: type[BaseException]) -> None:
    """The harness itself can fail."""
    with bounded(), pytest.raises(Finding, match=kind.__name__):
        take(broken(kind), b"x")


def test_memory_and_time_are_bounded() -> None:
    """An allocation of 1 GiB and an endless loop are findings."""
    large = Target(name="large", run=lambda data: bytearray(1 << 30), seeds=lambda: [b""])

    def endless(data: bytes) -> None:
        for _ in itertools.count():
            pass

    with bounded():
        with pytest.raises(Finding, match="MemoryError"):
            take(large, b"")
        with pytest.raises(Finding, match="more than"):
            take(Target(name="endless", run=endless, seeds=lambda: [b""]), b"", seconds=0.2)


def test_mutants_are_a_function_of_seed_and_number() -> None:
    """A finding can be made again."""
    target = TARGETS["pool-record"]
    first = list(itertools.islice(mutants(target, 5), 30))
    assert first == list(itertools.islice(mutants(target, 5), 30))
    assert first[20:] == list(itertools.islice(mutants(target, 5, 20), 10))
    assert len(set(first)) > 20


def test_mutants_are_not_larger_than_an_input_may_be() -> None:
    """Lists of lists are repeated in each other: 34 KB became 31 MB, and parsed several GB."""
    data = json.dumps([["x" * 20] * 900, [[["y" * 40] * 300]]]).encode()
    sizes = [len(mutated(random.Random(number), data, data)) for number in range(6000)]
    assert 10 * len(data) < max(sizes) <= MOST_BYTES
