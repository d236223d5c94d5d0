"""Running rows."""
