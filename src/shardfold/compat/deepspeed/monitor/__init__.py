"""Where figures of the training go: TensorBoard, CSV files, Weights & Biases, Comet."""
