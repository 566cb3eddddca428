"""The web dashboard: reads stored results through service.queries and renders them as HTML."""
