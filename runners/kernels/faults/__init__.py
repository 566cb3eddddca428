"""Kernels that are wrong on purpose, so that it is known what each metric and check sees."""

Edit = tuple[str, str]
"""A piece of a kernel's source that occurs exactly once, and what to put in its place."""
