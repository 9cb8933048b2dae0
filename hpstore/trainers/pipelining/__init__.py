"""Storage for pipeline-parallel trainers (torch.distributed.pipelining); docs/pipeline.md."""

from hpstore.trainers.pipelining.consumed_samples import Ledger
from hpstore.trainers.pipelining.events import ComputeEvent
from hpstore.trainers.pipelining.hooks import PipelineHooks
from hpstore.trainers.pipelining.idle_time import BubbleReport, RankBubbles
from hpstore.trainers.pipelining.schedules import SCHEDULES, make_schedule, stages_of
from hpstore.trainers.pipelining.step_record import StepRecord

__all__ = [
    "SCHEDULES",
    "BubbleReport",
    "ComputeEvent",
    "Ledger",
    "PipelineHooks",
    "RankBubbles",
    "StepRecord",
    "make_schedule",
    "stages_of",
]
