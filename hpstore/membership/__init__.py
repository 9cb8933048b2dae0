"""Which devices belong to a pool, and the locks and registers on them."""
