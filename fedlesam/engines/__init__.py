"""Engines train the active clients of a round, in this process or in several, and return their reduced results."""
