"""Making of row groups: their bytes are fetched, decoded and packed, within a memory."""
