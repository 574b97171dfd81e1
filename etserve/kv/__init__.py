"""Which blocks hold whose keys and values: bookkeeping only. Knows no tensors and no scheduling."""
