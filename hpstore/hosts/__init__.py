"""The service of a host: its disks as devices of pools on other hosts."""
