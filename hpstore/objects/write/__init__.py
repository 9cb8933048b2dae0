"""Writing objects: plan, stripes, columns, publish."""
