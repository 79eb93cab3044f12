"""Memory of adapters: pages at each adapter's own rank, on the host and the device."""
