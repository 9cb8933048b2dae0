"""The same targets guided by coverage, through atheris (pip install 'hpstore[fuzz]')."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from hpstore.errors import HpstoreError
from tests.fuzz.engine import Target


def fuzz(target: Target, inputs: int, corpus: Path) -> None:
    """Run libFuzzer on one target; it ends the process. New inputs go to build/fuzz-corpus/."""
    import atheris

    atheris.instrument_all()
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
        target.known["all"] = [data, *target.known["all"][-50:]]
        return target.mutant(rng)[:most]

    options = [sys.argv[0], str(kept), str(corpus), f"-runs={inputs}", "-rss_limit_mb=4096",
               "-timeout=20", "-max_len=65536", "-artifact_prefix=build/fuzz-"]  # fmt: skip
    atheris.Setup([o for o in options if o != str(corpus) or corpus.is_dir()], one_input,
                  custom_mutator=mutate)  # fmt: skip
    atheris.Fuzz()


__all__ = ["fuzz"]
