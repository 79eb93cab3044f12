"""Several servers behind one endpoint, chosen by which adapters they hold."""
