"""Reads run folders only: tables and pictures."""
