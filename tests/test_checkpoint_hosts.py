"""Checkpoints of hosts that share no disk: each has a part, and together they are what one folder would have been."""
