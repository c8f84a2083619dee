"""From the arrays of a case to a table of a cohort."""
