"""Attention over the paged KV cache: one contract, a torch reference and a native backend."""
