"""A deterministic simulator: several processes with real pool code on devices in memory.

`draw` makes a schedule from a seed, `run` runs it, and `shrink` leaves out what a finding does not
need. See docs/protocol.md, "The simulator".
"""

from hpstore.testing.simulation.draw import draw
from hpstore.testing.simulation.machinery import installed
from hpstore.testing.simulation.schedule import Schedule
from hpstore.testing.simulation.simulator import SimulationOutcome, run

__all__ = ["Schedule", "SimulationOutcome", "draw", "installed", "run"]
