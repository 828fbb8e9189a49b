"""The kinds of parameters that features gather other sources for."""

from deepcompile_zero3.features.extensions.extension import GatheredAsOthers
from deepcompile_zero3.sharding import source

source.KINDS += [
    GatheredAsOthers(),
]
