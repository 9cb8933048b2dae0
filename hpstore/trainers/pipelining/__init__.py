"""Storage for pipeline-parallel trainers (torch.distributed.pipelining); docs/pipeline.md."""

from hpstore.trainers.pipelining.bubbles import BubbleReport, RankBubbles
from hpstore.trainers.pipelining.events import Event
from hpstore.trainers.pipelining.hooks import PipelineHooks
from hpstore.trainers.pipelining.ledger import Ledger
from hpstore.trainers.pipelining.records import StepRecord

__all__ = ["BubbleReport", "Event", "Ledger", "PipelineHooks", "RankBubbles", "StepRecord"]
