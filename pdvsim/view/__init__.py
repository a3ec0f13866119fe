"""Results to look at: tables, pictures, the report."""
