"""What features gather in place of shards, and how they lay shards out."""

from deepcompile_zero3.features.extensions.extension import GatheredAsOthers
from deepcompile_zero3.features.hybrid.divided import divide
from deepcompile_zero3.sharding import placement, source

source.KINDS += [
    GatheredAsOthers(),
]
placement.CHANGES |= {
    "shard_optimizer_over_replicas": divide,
}
