"""What clients speak: Python, HTTP, Triton, a fleet, the command line. A door only translates."""
