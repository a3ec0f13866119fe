"""The simulator's data on cards and models: times, sharing, host costs, profiles."""
