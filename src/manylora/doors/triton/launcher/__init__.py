"""Starts, watches, restarts and stops a tritonserver."""
