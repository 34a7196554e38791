"""Benchmarks and other measurements; `python -m scripts.bench` compares with PEFT."""
