"""Live view of architectures that serve the same requests in step: controls, and metrics of the last seconds."""
