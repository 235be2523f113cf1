"""Data sets, splits over clients, and the batches a client trains on."""
