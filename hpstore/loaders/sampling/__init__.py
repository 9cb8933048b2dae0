"""Which samples come when: orders, ranks, windows, positions."""
