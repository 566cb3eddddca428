"""The database's history: the only way tables are made."""
