"""Each fact that graphs depend on shapes Dynamo's guard, the keys of caches and what passes see."""

import pytest
import torch
from support.pass_graphs import each_fact_changed
from torch import fx, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from deepcompile_zero3 import Options, fully_shard
from deepcompile_zero3.facts import LeafFacts, SourceFacts
from deepcompile_zero3.graph_inputs import facts_of_inputs
from deepcompile_zero3.passes.partitioner import Partitioner
from deepcompile_zero3.passes.pipeline import Pipeline
from deepcompile_zero3.sharding.module_parameters import parameters_of


@pytest.fixture
def module(one_rank):
    return fully_shard(nn.Linear(8, 8))


def _each_change(parameter):
    """Changes one fact of a parameter at a time, and yields its name; undoes all at the end."""
    leaf, source = parameter.leaf_facts, parameter.facts
    assert (type(leaf), type(source)) == (LeafFacts, SourceFacts)
    for name, other in each_fact_changed(leaf):
        parameter.set_facts(other, source)
        yield name
    for name, other in each_fact_changed(source):
        parameter.set_facts(leaf, other)
        yield name
    parameter.set_facts(leaf, source)


def test_dynamo_guards_on_each_fact(module):
    def run(module, x):
        return module(x)

    x = torch.ones(2, 8)
    torch.compile(run, backend="zero3", options={"inductor": False})(module, x)
    (entry,) = _debug_get_cache_entry_list(run.__code__)

    def may_run_again():
        return entry.guard_manager.check({"module": module, "x": x})

    assert may_run_again()
    for name in _each_change(parameters_of(module)["weight"]):
        assert not may_run_again(), name
    assert may_run_again()


def test_each_fact_is_in_the_keys_of_caches_and_in_what_passes_see(module):
    weight, bias = parameters_of(module).values()
    gm = fx.symbolic_trace(lambda weight, bias: weight + bias)

    def keys():
        inputs = facts_of_inputs({0: weight, 1: bias}, gm, Options())
        pipeline = Pipeline(inputs, Options(), 1.0)
        return repr(inputs[1]), repr(pipeline.key), repr(Partitioner(pipeline, {}).uuid())

    before = keys()
    for name in _each_change(bias):  # of the second, since graphs have numbers of process groups
        for now, then in zip(keys(), before, strict=True):
            assert now != then, name
    assert keys() == before


def test_facts_that_are_alike_have_one_text(one_rank):
    modules = [fully_shard(nn.Linear(8, 8, bias=False)) for _ in range(2)]
    one, other = (parameters_of(each)["weight"] for each in modules)
    assert one.guard_key is other.guard_key  # a guard that holds compares pointers
    other.set_reshard_after_forward(False)
    assert one.guard_key != other.guard_key
