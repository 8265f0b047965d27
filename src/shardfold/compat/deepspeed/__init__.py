"""DeepSpeed's public face: what its users call, done by calling the engine."""
