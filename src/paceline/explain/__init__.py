"""What went wrong, told from the logs of the ranks."""
