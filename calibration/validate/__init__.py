"""Real runs beside the same runs simulated, and beside other programs."""
