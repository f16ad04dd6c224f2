"""File formats: detecting them, reading their schemas and footers, and decoding row groups."""
