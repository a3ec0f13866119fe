"""Many runs: sweeps, where they run, their files, statistics."""
