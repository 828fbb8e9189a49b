"""What the process from which ranks are forked does once, so that no rank has to.

It imports what takes long, and compiles and runs a small function, since the first compilation of a
process takes as long as several later ones. No thread may run when it is forked.
"""

import gc
import threading

import hypothesis  # noqa: F401
import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import tqdm
import transformers.modeling_utils  # noqa: F401
from torch import nn

import deepcompile_zero3.backend
import deepcompile_zero3.sharding.fully_shard  # noqa: F401


def _compile_once():
    model = nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2), nn.GELU())
    # Without a backward, also in the compiler: no process that is forked after one can have any.
    with torch.no_grad():
        torch.compile(model, backend="aot_eager")(torch.ones(1, 2))
    torch._dynamo.reset()


tqdm.tqdm.monitor_interval = 0  # Dynamo's would start a thread
_compile_once()
gc.collect()
gc.freeze()  # later collections would visit all of torch, which takes 0.2 s
assert threading.active_count() == 1
