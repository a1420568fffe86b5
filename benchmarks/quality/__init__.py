"""The parts of `benchmarks/accuracy.py`: how far each attention backend of each engine lies from fp32."""
