"""The bytes of one file: its format, its schema, its footer, and how one of its row groups is read."""
