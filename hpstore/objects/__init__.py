"""One object on many devices: survey, read, write, repair."""
