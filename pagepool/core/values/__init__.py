"""What a caller may give: arguments, ids, hash chains."""
