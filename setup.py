"""Kept for tools that still look for it; everything is declared in pyproject.toml."""

from setuptools import setup

setup()
