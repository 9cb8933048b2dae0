"""From evidence to states of devices, and what reads make of them."""
