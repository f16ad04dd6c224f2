"""Decoded rows: records that each host decodes once, keeps in the cache, and gathers in every epoch."""
