"""The mathematics of a round, and what it stands on."""
