"""Pages behind a pool, and copies between pages."""
