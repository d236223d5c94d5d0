"""What the commands share: options, sizes, memory checks, progress, and the forms of their results."""
