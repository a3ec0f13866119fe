"""Shared by all commands: files, messages, options, progress."""
