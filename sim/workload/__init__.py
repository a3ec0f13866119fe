"""Requests: arrival times, lengths and acceptance."""
