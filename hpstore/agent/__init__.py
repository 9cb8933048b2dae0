"""One process on each node that looks after a pool: drains, rebuilds, readmits, scrubs, reports.

Without it each process avoids slow devices in its own reads, and rebuilding waits for
`hpstore rebuild`.
"""

from hpstore.agent.agent_config import AgentConfig, agent_config
from hpstore.agent.loop import Agent

__all__ = ["Agent", "AgentConfig", "agent_config"]
