"""Leaves out what torch does in each job and at each compilation for nothing that a test looks at.

To import it imports torch's compiler, before which conftest.py sets the folder of its cache.
"""

import gc

from torch._dynamo import guards, trace_rules

# init_process_group empties the tables of what Dynamo traces, since those made while torch was
# being imported may lack torch.distributed. Later ones are the same, and take 25 ms.
trace_rules.clear_lru_cache()
trace_rules.clear_lru_cache = lambda: None
# Flushes the processor's caches, to log how long a graph's guards take. 20 ms.
guards.profile_guard_manager = lambda *_: 0.0
# A compilation allocates much that lives until it ends, and a collection visits it. Each test ends
# with a collection of all.
gc.set_threshold(10_000, 20, 50)
