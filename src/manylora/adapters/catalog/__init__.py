"""Which adapter a name or a task id is, and where its bytes are: one catalog for all entry points.

`AdapterLibrary` is its index by task id, which the engine asks. `AdapterCatalog` is the HTTP server's index
by name, also in front of Triton. Names, folders, readers, versions and copies are the same for both.
"""
