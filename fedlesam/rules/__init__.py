"""The three slots of a method: where to look (perturbation), how to turn (correction), how to land (server rule)."""
