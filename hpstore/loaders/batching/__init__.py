"""From positions to batches: threads, memory, copies, transforms."""
