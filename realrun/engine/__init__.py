"""The GPU engine: models, kernels, graphs."""
