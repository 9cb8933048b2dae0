"""The scheme of a pool, k+m, as users write it: "4+2", or k and m by themselves."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpstore.errors import ConfigError

_WRITTEN = re.compile(r"([0-9]{1,4})\+([0-9]{1,4})")  # int() of more digits may be refused, or slow
_ONE_WAY = 'give scheme="4+2", or data=4 and parity=2'


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolScheme:
    """k data and m parity units of a stripe. Whether they can be coded is for `check_width`."""

    data: int
    parity: int

    def __str__(self) -> str:
        return f"{self.data}+{self.parity}"


def parse_scheme(text: str) -> PoolScheme:
    """The scheme that "k+m" means. Raises ConfigError."""
    match = _WRITTEN.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is not a scheme: write k+m, such as 4+2")
    return PoolScheme(data=int(match.group(1)), parity=int(match.group(2)))


def choose_scheme(data: int | None, parity: int | None, scheme: str | None) -> PoolScheme:
    """The scheme that a caller gave by `scheme`, or by `data` and `parity`.

    Both are accepted if they agree. Raises ConfigError.
    """
    if scheme is not None:
        chosen = parse_scheme(scheme)
        if data not in (None, chosen.data) or parity not in (None, chosen.parity):
            raise ConfigError(
                f"scheme={scheme!r} and data={data}, parity={parity} differ: {_ONE_WAY}"
            )
        return chosen
    if data is None or parity is None:
        raise ConfigError(f"data={data}, parity={parity} is not a whole scheme: {_ONE_WAY}")
    return PoolScheme(data=data, parity=parity)
