"""The `hpstore` command.

Exit codes: 0 done; 1 an unexpected error; 2 bad arguments or settings; 3 bad key; 4 no such
object; 5 version conflict; 10-16 device errors; 20 newer format; 21 integrity; 30-35 redundancy,
membership, locks, budgets; 40-41 checkpoints; 45 ingest; 50 scrub, rebuild or verify found what
cannot be repaired; 60-61 direct reads into GPU memory; 70-71 failure forecasts; 130 interrupted.
Each class of hpstore.errors names its own.
"""

from __future__ import annotations

import io
import logging
import sys

from hpstore.cli.command_tree import app
from hpstore.cli.output import VisibleLog, write_err
from hpstore.errors import HpstoreError


def main() -> None:
    """Run the command line; errors become one line and their class' exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # an ASCII terminal shows every key
    handler = logging.StreamHandler()
    handler.setFormatter(VisibleLog("%(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    try:
        app(prog_name="hpstore")  # also of `python -m hpstore`, for completion scripts
    except HpstoreError as error:
        write_err(f"hpstore: {type(error).__name__}: {error}\n")
        sys.exit(error.exit_code)
    except OSError as error:
        write_err(f"hpstore: {error}\n")
        sys.exit(1)


__all__ = ["app", "main"]
