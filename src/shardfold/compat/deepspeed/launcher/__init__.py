"""DeepSpeed's launcher."""
