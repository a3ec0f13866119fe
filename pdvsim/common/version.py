"""The version of pdvsim: written in results, read by the build."""

__version__ = "0.1.0"
