"""python -m hpstore.testing.simulation: see campaign.py and --help."""

from __future__ import annotations

import os
import sys

from hpstore.testing.simulation.campaign import main

if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the code under test goes over sets of names
        command = [sys.executable, "-m", "hpstore.testing.simulation", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main())
