"""What two steps of a run differ in."""
