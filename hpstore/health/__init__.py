"""Health of devices: slow ones, dying ones."""
