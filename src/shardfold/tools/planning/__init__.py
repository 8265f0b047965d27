"""The command `shardfold plan`: models by name, what fits where, as text."""
