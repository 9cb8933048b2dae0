"""Settings of Ray for tests that start it, as environment variables."""

RAY = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_raylet_start_wait_time_s": "200",  # 30 s are too few for a node on a busy machine
    "RAY_memory_monitor_refresh_ms": "0",  # else it kills workers where others use the memory
}
