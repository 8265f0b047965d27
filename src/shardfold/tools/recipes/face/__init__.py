"""The face-recognition recipe: drawn or photographed faces, a ViT, a head larger than it, verification."""
