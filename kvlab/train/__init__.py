"""Scripts that made the checkpoints kvlab ships."""
