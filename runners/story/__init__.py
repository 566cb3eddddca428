"""The story repository: a small history of one kernel, with the verdict that each commit deserves.

legacy.py, fused.py and lean.py are sources of the story's commits: read as text, never imported by us.
"""
