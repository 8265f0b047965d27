"""What a run shows and leaves behind: metrics as data, progress on the terminal, pictures."""
