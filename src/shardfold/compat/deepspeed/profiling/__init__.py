"""What a step costs: floating-point operations, time, bytes sent."""
