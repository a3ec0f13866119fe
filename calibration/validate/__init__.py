"""Comparison of real runs with the same runs simulated, and with other programs."""
