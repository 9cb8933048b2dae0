"""torch.distributed.checkpoint on a pool: storage writer, reader and stager."""
