"""What bites people, looked for before it does: small checks of a machine, a cache folder, a store, a cluster."""
