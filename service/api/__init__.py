"""Thin REST routers under /api/v1: parse, call one function, return."""
