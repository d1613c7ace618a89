"""What a quantized tensor is. Depends on torch alone."""
