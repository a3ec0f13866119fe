"""Output of results: tables, plots, the report."""
