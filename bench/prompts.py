"""The fixed prompts of comparisons with another engine.

Two engines that round differently give the same greedy tokens only where no step is a close call. So PROMPTS are chosen
by a rule that looks at neither: `bench.choose_prompts` lets the float64 reference continue every candidate of
bench/prompt_candidates.py greedily on the demo model; those are fit whose two best logits are at least SMALLEST_GAP
apart at each of NUM_TOKENS steps, and the NUM_PROMPTS with the largest such gaps are taken, at most MOST_OF_A_KIND of
one kind. What rounding does where it may decide is measured on OPEN_PROMPTS, which nobody selected.
"""

NUM_PROMPTS = 20
NUM_TOKENS = 32
MOST_OF_A_KIND = 2
# Logits. Both engines' logits are some 0.5 off at worst among 49,152, most of them by a fifth of that.
SMALLEST_GAP = 0.3


def is_chat(kind: str) -> bool:
    """Whether control tokens are recognised in texts of this kind."""
    return kind.startswith("chat")


def chatml(*turns: str) -> str:
    """Turns of user and assistant by turns, and the beginning of the assistant's next."""
    roles = ("user", "assistant")
    text = "".join(f"<|im_start|>{roles[i % 2]}\n{turn}<|im_end|>\n" for i, turn in enumerate(turns))
    return f"{text}<|im_start|>assistant\n"


# (kind, text), in the candidates' order.
PROMPTS: tuple[tuple[str, str], ...] = (
    ("counting", "Count from one to twenty: 1, 2, 3, 4, 5, 6,"),
    ("counting", "2, 4, 6, 8, 10, 12, 14, 16,"),
    ("calendar", "Spring, summer, autumn, winter, spring, summer, autumn, winter, spring,"),
    ("calendar", "2001\n2002\n2003\n2004\n2005\n2006\n"),
    ("alphabet", "a\nb\nc\nd\ne\nf\n"),
    ("arithmetic", "1 + 1 = 2, 1 + 2 = 3, 1 + 3 = 4, 1 + 4 = 5, 1 + 5 ="),
    ("python", "def is_even(n):\n    return n % 2 == 0\n\ndef is_odd(n):\n    return"),
    ("c and java", "public int getX() {\n    return x;\n}\n\npublic int getY() {\n"),
    ("sql", "SELECT id FROM a;\nSELECT id FROM b;\nSELECT id FROM c;\n"),
    ("sql", "DROP TABLE IF EXISTS a;\nDROP TABLE IF EXISTS b;\nDROP TABLE"),
    ("json", "[1, 2, 3, 4, 5, 6, 7, 8,"),
    ("json", '[{"x": 0, "y": 0}, {"x": 1, "y": 1}, {"x": 2, "y": 2}, {"x":'),
    ("markup", "# Title\n\n## Part 1\n\nText of part 1.\n\n## Part 2\n\nText of part 2.\n\n## Part"),
    ("markup", "<tr><td>1</td><td>one</td></tr>\n<tr><td>2</td><td>two</td></tr>\n<tr><td>"),
    ("french", "je suis, tu es, il est, nous sommes, vous"),
    ("other scripts", "🙂🙃🙂🙃🙂🙃🙂"),
    ("other scripts", "これはペンです。これは本です。これはペンです。これは"),
    ("refrain", "Knock knock. Who's there? Knock knock. Who's there? Knock"),
    ("chat", chatml("Say hello.")),
    (
        "chat of several turns",
        chatml("What colour is the sky?", "Blue.", "What colour is the sky?", "Blue.", "What colour is the sky?"),
    ),
)

OPEN_PROMPTS = (
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
