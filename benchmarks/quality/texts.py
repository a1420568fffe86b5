"""What is asked: questions of gsm_symbolic, a book, and places in the book at which one more token is asked for."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

BOOK = "data/in_the_year_2889.txt"
QUESTIONS = 64
BOOK_TOKENS = 8000
PLACES = range(1500, BOOK_TOKENS, 10)
ANSWER_TOKENS = 200


def make(model: Path, questions: int = QUESTIONS, book_tokens: int = BOOK_TOKENS) -> dict:
    """Texts as token ids.

    Args:
        model: Directory of the model whose tokenizer is used.
        questions: How many of gsm_symbolic.
        book_tokens: How much of the book, at most.

    Returns:
        "texts": of each question and of the book, name and tokens; every token but the first is scored.
        "questions": name, tokens, and the number that is the right answer; each is answered greedily.
        "places": lengths of the book's beginnings after which one token is asked for, each once with nothing in the
        prefix cache and once with what comes before.
        "answer_tokens": how long an answer may be.
    """
    import reasoning_gym
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = []
    for i, entry in enumerate(reasoning_gym.create_dataset("gsm_symbolic", size=questions, seed=1)):
        prompt = f"Question: {entry['question']}\nAnswer:"
        asked.append({"name": f"gsm_symbolic {i}", "tokens": tokenizer(prompt)["input_ids"], "answer": entry["answer"]})
    book = tokenizer(resources.files("reasoning_gym").joinpath(BOOK).read_text())["input_ids"][:book_tokens]
    texts = [{"name": q["name"], "tokens": q["tokens"]} for q in asked] + [{"name": "the book", "tokens": book}]
    places = [n for n in PLACES if n < len(book)]
    return {"texts": texts, "questions": asked, "places": places, "answer_tokens": ANSWER_TOKENS}
