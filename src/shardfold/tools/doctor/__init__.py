"""``shardfold doctor``: what is wrong with an installation, what costs speed, and what this machine can do."""
