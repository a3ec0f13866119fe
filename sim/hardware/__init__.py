"""What the simulator knows of cards and models: times, sharing, host costs, profiles."""
