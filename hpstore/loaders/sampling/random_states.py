"""The random numbers that a process draws: of torch, numpy and random, as JSON and back."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hpstore.errors import ConfigError


def random_state() -> dict[str, Any]:
    """Of torch's generator of the CPU and the global ones of numpy and random: 10 KB, 20 us."""
    found: Any = np.random.get_state()  # numpy's stubs: a tuple or a dict
    _, words, place, has_gauss, gauss = found
    version, numbers, other = random.getstate()
    return {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "numpy": [words.tobytes().hex(), int(place), int(has_gauss), float(gauss)],
        "python": [version, array("Q", numbers).tobytes().hex(), other],
    }


def set_random_state(found: Mapping[str, Any]) -> None:
    """Go on from it. Raises ConfigError where it is none; nothing is changed then."""
    try:
        words, place, has_gauss, gauss = found["numpy"]
        version, numbers, other = found["python"]
        words = np.frombuffer(bytes.fromhex(words), np.uint32)
        drawn = tuple(array("Q", bytes.fromhex(numbers)))
        torch_state = np.frombuffer(bytes.fromhex(found["torch"]), np.uint8).copy()
        of_random, of_numpy = random.Random(), np.random.RandomState()
        of_random.setstate((version, drawn, other))
        of_numpy.set_state(("MT19937", words, place, has_gauss, gauss))
        torch.Generator().set_state(torch.from_numpy(torch_state))
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(f"the saved state of random numbers is none: {error}") from error
    torch.set_rng_state(torch.from_numpy(torch_state))
    np.random.set_state(("MT19937", words, place, has_gauss, gauss))
    random.setstate((version, drawn, other))
