"""Many runs: sweeps, where they run, what is kept of them, statistics."""
