"""What the processes of a pool agree through: registers, their bytes, and claims of keys."""
