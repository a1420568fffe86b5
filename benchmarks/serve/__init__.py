"""The parts of `benchmarks/serving.py`: two servers on one card, one engine's own client, and what came of it."""
