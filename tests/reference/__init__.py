"""The float64 reference that logits are held to."""
