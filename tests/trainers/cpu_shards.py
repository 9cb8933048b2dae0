"""FSDP2 of the real accelerate on the CPU, where it trains DDP whatever it is asked for."""

from __future__ import annotations

from typing import Any


def shard_on_the_cpu() -> None:
    """Let accelerate take an FSDP plugin on the CPU, too; all that follows is its own code."""
    from accelerate import state

    original = state.AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            self.distributed_type = state.DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            state.PartialState._shared_state["distributed_type"] = self.distributed_type

    state.AcceleratorState.__init__ = init
