"""What benchmarks/findings.py is made of: documents, arms that go on from dense prefixes, sets of blocks, scores."""
