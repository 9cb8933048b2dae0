"""Scripts that are run by hand; nothing imports them."""
