"""What of fp16 users import."""
