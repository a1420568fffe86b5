"""What is asked: questions of gsm_symbolic, and long pieces of a book that share their beginning."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

BOOK = "data/in_the_year_2889.txt"


@dataclass(frozen=True)
class Size:
    """How much is asked.

    Args:
        questions: gsm_symbolic questions.
        book_prompts: Pieces of the book.
        book_tokens: Tokens of each piece.
        shared_tokens: Tokens that all pieces begin with.
        new_tokens: Tokens generated for every prompt.
        chunk: Most tokens of a step: the engines' chunked prefill.
    """

    questions: int
    book_prompts: int
    book_tokens: int
    shared_tokens: int
    new_tokens: int
    chunk: int


DEFAULT = Size(questions=8, book_prompts=2, book_tokens=1500, shared_tokens=1000, new_tokens=32, chunk=512)
FULL = Size(questions=64, book_prompts=6, book_tokens=3000, shared_tokens=2000, new_tokens=64, chunk=512)


def make(model: Path, size: Size) -> dict:
    """Prompts as token ids, in waves: each wave is sent at once, after the one before has been answered.

    The first wave holds the questions and the first piece of the book; the pieces that follow find their beginning
    in the prefix cache.
    """
    import reasoning_gym
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    questions = reasoning_gym.create_dataset("gsm_symbolic", size=size.questions, seed=1)
    first = [
        {"name": f"gsm_symbolic {i}", "tokens": tokenizer(f"Question: {q['question']}\nAnswer:")["input_ids"]}
        for i, q in enumerate(questions)
    ]
    text = resources.files("reasoning_gym").joinpath(BOOK).read_text()
    ids = tokenizer(text)["input_ids"]
    tail = size.book_tokens - size.shared_tokens
    pieces = [
        {
            "name": f"book {i}",
            "tokens": ids[: size.shared_tokens]
            + ids[size.shared_tokens + i * tail : size.shared_tokens + (i + 1) * tail],
        }
        for i in range(size.book_prompts)
    ]
    return {
        "waves": [first + pieces[:1], pieces[1:]],
        "new_tokens": size.new_tokens,
        "chunk": size.chunk,
        "longest": size.book_tokens + size.new_tokens + 8,
        "shared_tokens": size.shared_tokens,
    }
