"""Norms, clipping and loss scales: what keeps 16-bit training from going wrong in silence."""
