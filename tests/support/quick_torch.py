"""Leaves out what torch does in each job and at each compilation for nothing that a test looks at.

Ranks import this, and so do processes that begin a job of one rank, for all that they run
afterwards. Command lines and ranks that are spawned do not: with them, tests see torch as users do.
To import it imports torch's compiler, before which conftest.py sets the folder of its cache.
"""

from torch._dynamo import guards, trace_rules

# init_process_group empties the tables of what Dynamo traces, since those made while torch was
# being imported may lack torch.distributed. Later ones are the same, and take 25 ms.
trace_rules.clear_lru_cache()
trace_rules.clear_lru_cache = lambda: None
# Flushes the processor's caches, to log how long a graph's guards take. 20 ms.
guards.profile_guard_manager = lambda *_: 0.0
