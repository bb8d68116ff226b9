"""Strata: an LLM server whose conversations outlive VRAM, RAM and restarts."""

__version__ = "0.1.0"
