"""Models: their layers and sizes, read from configurations and known by name."""
