"""Samples to profiles."""
