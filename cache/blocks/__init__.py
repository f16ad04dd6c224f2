"""Objects as blocks: ranges and files, read through a tier."""
