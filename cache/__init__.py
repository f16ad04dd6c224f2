"""The caching filesystem and its tiers: bytes, keys and processes. No torch, no Arrow schema."""
