"""Device health: who is slow, hung or failing, and what is to be done about it.

Detectors and policy are pure: time, evidence and facts are arguments.
"""

from hpstore.health.detect.evidence import Media, Signs, Traits
from hpstore.health.detect.slow import SlowDetector
from hpstore.health.detect.slow_config import SlowConfig
from hpstore.health.detect.verdicts import DeviceVerdict, HealthState

__all__ = ["DeviceVerdict", "HealthState", "Media", "Signs", "SlowConfig", "SlowDetector", "Traits"]
