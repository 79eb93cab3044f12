"""The status page, and the JSON that it polls."""
