"""The version of this package.  A leaf, so that every layer can name it without importing the package itself."""

from __future__ import annotations

VERSION = "0.1.0"
