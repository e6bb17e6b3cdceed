"""Measurements, and what they need: models of real shape, a peer to compare with, committed results."""
