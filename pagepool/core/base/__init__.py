"""What every room stands on: the platform, locks, arrays and limits."""
