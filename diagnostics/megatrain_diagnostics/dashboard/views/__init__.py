"""Pure functions from what is known of a job to documents and arrays, one file a view."""
