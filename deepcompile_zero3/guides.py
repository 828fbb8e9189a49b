"""Sections of the documentation that errors and ``doctor`` lead to."""

from enum import StrEnum


class Guide(StrEnum):
    """A section of a page, by its path in this repository. The site has the same pages."""

    FROM_SOURCE = "docs/install.md#from-source"
    INSTALLATION = "docs/debugging.md#installation"
    DISAGREEMENT = "docs/debugging.md#ranks-that-disagree"
    TIMEOUTS = "docs/hosts.md#start"
    NAN = "docs/debugging.md#a-nan"
    CUDA = "docs/gpu.md#building"
    SILENT = "docs/limits.md#silent-nothing-is-raised"
    COMPILED_CODE = "docs/limits.md#compiled-code"
    METHODS = "docs/fsdp2.md#methods-of-a-sharded-module"
