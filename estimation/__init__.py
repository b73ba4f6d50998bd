"""Memory and step time of any composition, before launch and without a GPU."""
