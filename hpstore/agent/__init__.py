"""One process on each node that looks after a pool: drains, heals, takes back, scrubs, and tells.

Without it each process routes its own reads around slow devices, and rebuilding waits for
`hpstore rebuild`.
"""

from hpstore.agent.agent_config import AgentConfig, agent_config
from hpstore.agent.loop import Agent

__all__ = ["Agent", "AgentConfig", "agent_config"]
