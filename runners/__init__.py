"""Runners: execute a commit's kernels on this host and post what was measured."""
