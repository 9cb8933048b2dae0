"""Memory of a node that outlives the processes that fill it (docs/decisions/0126)."""
