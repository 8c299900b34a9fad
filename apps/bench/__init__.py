"""Measure this device: kernels as shares of its own ceilings, models in tokens a second, dispatches in microseconds."""

from apps.bench.cli import add_arguments, run

__all__ = ["add_arguments", "run"]
