"""Requests: when they come, how long they are, which drafts are accepted."""
