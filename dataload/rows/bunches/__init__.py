"""Small row groups, made many at a time."""
