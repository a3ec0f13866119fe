"""Records to figures."""
