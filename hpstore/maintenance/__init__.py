"""Keeping objects whole: scrub, rebuild, rebalance, repair, sweep."""
