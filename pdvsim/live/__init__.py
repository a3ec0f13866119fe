"""Architectures while they serve: the same requests in step, settings to turn, figures of the last seconds."""
