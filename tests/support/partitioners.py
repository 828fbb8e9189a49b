"""A partitioner of joint graphs that is not torch's default."""

from functorch.compile import default_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn


class DefaultPartition(CustomPartitionerFn):
    """Recomputes nothing, and counts its calls."""

    def __init__(self, key):
        self.key = key
        self.calls = 0

    def __call__(self, gm, joint_inputs, *, num_fwd_outputs, **_):
        self.calls += 1
        return default_partition(gm, joint_inputs, num_fwd_outputs=num_fwd_outputs)

    def uuid(self):
        return self.key
