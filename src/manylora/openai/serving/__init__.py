"""How requests are served: connections, keys, fairness, engines, streams."""
