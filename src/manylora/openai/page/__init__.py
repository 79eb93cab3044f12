"""The status page and the feed that it polls."""
