"""Storage for pipeline-parallel trainers (torch.distributed.pipelining); docs/pipeline.md."""

from hpstore.trainers.pipelining.bubbles import BubbleReport, RankBubbles
from hpstore.trainers.pipelining.events import Event
from hpstore.trainers.pipelining.hooks import PipelineHooks
from hpstore.trainers.pipelining.ledger import Ledger
from hpstore.trainers.pipelining.records import StepRecord
from hpstore.trainers.pipelining.schedules import SCHEDULES, make_schedule, stages_of

__all__ = ["SCHEDULES", "BubbleReport", "Event", "Ledger", "PipelineHooks", "RankBubbles",
           "StepRecord", "make_schedule", "stages_of"]  # fmt: skip
