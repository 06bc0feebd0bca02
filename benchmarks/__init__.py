"""Benchmarks of the trainer, each a script of its own; README.md here shows what they found."""
