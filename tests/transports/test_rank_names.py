"""Messages name ranks by their numbers in the job, and by their hosts if these are several."""

import torch.distributed as dist

from deepcompile_zero3.transport.rank_names import learn_hosts, rank_names


def _of_two_hosts():
    learn_hosts([(0, "a"), (1, "b")])
    return rank_names(dist.group.WORLD)


def _names():
    return rank_names(dist.group.WORLD)


def test_a_process_forgets_the_hosts_of_an_earlier_job(run_ranks):
    assert run_ranks(2, _of_two_hosts)[0] == ["0 (host a)", "1 (host b)"]
    assert run_ranks(2, _names)[0] == ["0", "1"]
