"""One process on each node that looks after a pool: drains, heals, takes back, scrubs, and tells.

Without it each process routes its own reads around slow devices, and rebuilding waits for
`hpstore rebuild`.
"""

from hpstore.agent.loop import Agent
from hpstore.agent.settings import AgentConfig, agent_config

__all__ = ["Agent", "AgentConfig", "agent_config"]
