"""Values from callers: arguments, ids, hash chains."""
