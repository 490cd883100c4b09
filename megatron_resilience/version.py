"""The package's version, and nothing else: setuptools reads it without importing torch."""

__version__ = "0.1.0"
