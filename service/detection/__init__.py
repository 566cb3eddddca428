"""Pure decision rules: numbers in, dataclasses out; no database, no web, no settings."""
