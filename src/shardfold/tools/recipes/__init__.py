"""Complete trainings to run, read and copy: `lm` trains a byte-level GPT on any text."""
