"""One target guided by coverage, through atheris: python -m tests.fuzz.guided TARGET [INPUTS]

pip install 'hpstore[fuzz]'. New inputs go to build/fuzz-corpus/, findings to build/.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str]) -> None:
    """Run libFuzzer; it ends the process."""
    import atheris

    with atheris.instrument_imports(include=["hpstore"]):  # before anything imports it
        from hpstore.errors import HpstoreError
        from tests.fuzz.targets import TARGETS
    target = TARGETS[arguments[0]]
    kept = Path("build/fuzz-corpus") / target.name
    kept.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(target.inputs()):
        (kept / f"seed-{number}").write_bytes(data)

    def one_input(data: bytes) -> None:
        try:
            target.run(data)
        except HpstoreError:
            return

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.5:
            return bytes(atheris.Mutate(data, most))
        target.known["all"] = [bytes(data), *target.known["all"][:50]]
        return target.mutant(rng)[:most]

    runs = arguments[1] if len(arguments) > 1 else "1000000"
    options = [
        sys.argv[0],
        str(kept),
        f"-runs={runs}",
        "-rss_limit_mb=4096",
        "-timeout=20",
        "-max_len=65536",
        "-artifact_prefix=build/fuzz-",
    ]
    atheris.Setup(options, one_input, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
