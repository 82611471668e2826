"""Benchmarks: each module runs as ``python -m bench.NAME`` and writes one JSON result file."""
