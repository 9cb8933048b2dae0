"""Device health: who is slow, hung or failing, and what is to be done about it.

Detectors and policy are pure: time, evidence and facts are arguments.
"""

from hpstore.health.signs import Media, Signs, Traits
from hpstore.health.slow import SlowConfig, SlowDetector
from hpstore.health.verdicts import HealthState, Verdict

__all__ = ["HealthState", "Media", "Signs", "SlowConfig", "SlowDetector", "Traits", "Verdict"]
