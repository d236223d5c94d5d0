"""The tier behind a pool, and moves of pages."""
