"""GGUF files of real shape with random weights: what a benchmark needs of a model that cannot be fetched.

    python -m bench.synthesize qwen2.5-0.5b q4_k_m OUT.gguf

NumPy only, so that it runs wherever a benchmark does.
"""

from bench.synthesize.mix import MIXES
from bench.synthesize.model import ModelShape, miniature
from bench.synthesize.shapes import SHAPES
from bench.synthesize.synthesize import synthesize

__all__ = ["MIXES", "SHAPES", "ModelShape", "miniature", "synthesize"]
