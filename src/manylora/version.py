"""The version of this package, for modules that `manylora` itself imports."""

__version__ = "0.1.0"
