"""The tables and figures of the FedLESAM paper as data, the runs they need, and what came of them."""
