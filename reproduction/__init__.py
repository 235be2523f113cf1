"""The tables and figures of the FedLESAM paper as data, the runs they need, and the results beside the printed ones."""
