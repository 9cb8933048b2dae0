"""Bytes of hpstore: keys, headers, records, checksums, geometry. No I/O."""
