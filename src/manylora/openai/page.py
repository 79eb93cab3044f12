"""The page at /. A placeholder for people who open the address in a browser."""

from __future__ import annotations

__all__ = ["PAGE"]

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>manylora</title><h1>manylora</h1></html>
"""
