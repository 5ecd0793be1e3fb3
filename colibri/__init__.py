"""Colibri: a minimal, fast inference engine for Mixture-of-Experts language models."""
