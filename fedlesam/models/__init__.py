"""The networks, and a module seen as one flat vector."""
