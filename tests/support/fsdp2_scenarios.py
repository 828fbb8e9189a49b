"""Shared parts of the scenarios of FSDP2's tests."""

from support.models import Stack
from torch.utils.checkpoint import checkpoint


def fqns(log, op):
    return [fqn for c in log if c.op == op for fqn in c.params]


def gathered_in(log):
    return fqns(log, "all_gather")


class Recomputing(Stack):
    """A stack whose blocks are recomputed in backward."""

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)
