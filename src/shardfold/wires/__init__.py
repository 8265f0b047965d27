"""WIRES: how the bytes of a journey travel. A wire sees padded, aligned flat tensors and knows no layout."""
