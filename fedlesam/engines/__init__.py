"""Who trains the active clients of a round: this process, or several. Jobs in, reduced answers out."""
