"""What runs next. Knows no tensors, no text and no model."""
