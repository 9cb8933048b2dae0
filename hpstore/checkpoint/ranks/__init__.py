"""The ranks of a job: collectives, an agreed stop, signals, forks."""
