"""The fixed prompts of comparisons: prose, code, lists, numbers, other scripts."""

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village at the edge of the forest,",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "Dear Sir or Madam,\n\nI am writing to you because",
    "The three primary colours are",
    "1, 2, 4, 8, 16,",
    "In 1969, the first human being to walk on the Moon was",
    "To make a good cup of tea, first",
    "SELECT name, price FROM products WHERE",
    "The mitochondrion is often called",
    "Q: What is the largest ocean on Earth?\nA:",
    "She opened the door and saw",
    "The theory of relativity states that",
    "import numpy as np\n\nx = np.",
    "La capitale de l'Italie est",
    "A haiku about autumn:\n",
    "The quick brown fox jumps over the lazy dog. The dog",
    "Ingredients:\n- 2 eggs\n- 100 g of flour\n-",
    "Photosynthesis is the process by which plants convert sunlight, water and carbon dioxide into",
)
