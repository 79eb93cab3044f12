"""Several servers behind one endpoint. Requests are routed by the adapters that the servers hold."""
