"""The tier that hosts share, in a Valkey or Redis."""
