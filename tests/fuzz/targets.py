"""All fuzz targets by name."""

from __future__ import annotations

from tests.fuzz.checkpoint_targets import CHECKPOINT_TARGETS
from tests.fuzz.data_targets import DATA_TARGETS
from tests.fuzz.engine import Target
from tests.fuzz.field_targets import FIELD_TARGETS
from tests.fuzz.health_targets import HEALTH_TARGETS
from tests.fuzz.host_targets import HOST_TARGETS
from tests.fuzz.pool_targets import POOL_TARGETS
from tests.fuzz.register_targets import REGISTER_TARGETS
from tests.fuzz.source_targets import SOURCE_TARGETS
from tests.fuzz.trace_targets import TRACE_TARGETS
from tests.fuzz.weight_file_targets import WEIGHT_FILE_TARGETS

_ALL = (
    *POOL_TARGETS,
    *HEALTH_TARGETS,
    *CHECKPOINT_TARGETS,
    *WEIGHT_FILE_TARGETS,
    *DATA_TARGETS,
    *FIELD_TARGETS,
    *SOURCE_TARGETS,
    *HOST_TARGETS,
    *TRACE_TARGETS,
    *REGISTER_TARGETS,
)
TARGETS: dict[str, Target] = {target.name: target for target in _ALL}
