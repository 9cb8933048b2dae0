"""Datasets on a pool: manifest, layout, records."""
