"""The byte-equality gate: recorded tokens, and everything that must not change them."""
