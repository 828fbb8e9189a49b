"""What the process from which ranks are forked does once, so that no rank has to.

It imports, and makes the tables of what Dynamo traces. It runs no backward, after which torch for
CUDA refuses others in processes that are forked.
"""

import gc
import threading

import hypothesis  # noqa: F401
import support.quick_torch  # noqa: F401
import torch.distributed.tensor.debug  # noqa: F401
import transformers.modeling_utils  # noqa: F401
from torch._dynamo import list_backends, trace_rules

import deepcompile_zero3.backend
import deepcompile_zero3.sharding.fully_shard  # noqa: F401

list_backends()  # imports them
trace_rules.get_torch_obj_rule_map()
# A compilation allocates much that lives until it ends, and a collection visits it. Jobs of one
# rank collect as often as Python does by itself.
gc.set_threshold(10_000, 20, 50)
gc.collect()
gc.freeze()  # later collections would visit all of torch, which takes 0.2 s
assert threading.active_count() == 1  # others would not be in a process that is forked
