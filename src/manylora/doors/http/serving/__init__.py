"""Serving of requests: connections, API keys, fairness, engines, streams."""
