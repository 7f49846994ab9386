"""Searching for launch settings: a setting that is not right is refused, whatever its speed."""
