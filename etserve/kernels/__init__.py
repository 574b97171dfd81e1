"""One Python function per native operation, its torch reference beside it. Checks happen here, before any pointer."""
