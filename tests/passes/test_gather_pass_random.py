"""insert_gathers on random graphs: each parameter is gathered once, before its uses."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pass_graphs import facts
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from deepcompile_zero3.graph.metadata import PARAMETER, fqns_of
from deepcompile_zero3.passes.chain import chain_reductions
from deepcompile_zero3.passes.gather import insert_gathers
from deepcompile_zero3.passes.keep import choose_kept
from deepcompile_zero3.runtime import ops


def gathers_of(gm):
    return gm.graph.find_nodes(op="call_function", target=ops.all_gather_start.default)


@st.composite
def models(draw):
    """Draws a chain of ops on parameters p0, p1, ... in any order: (gm, facts, bucket_bytes)."""
    count = draw(st.integers(1, 6))
    limit = draw(st.integers(1, 100))
    uses = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["mm", "add", "view", "pair"]),
                st.integers(0, count - 1),
                st.integers(0, count - 1),
            ),
            max_size=12,
        )
    )
    saved = draw(st.sets(st.integers(0, count - 1)))

    graph = fx.Graph()
    x = graph.placeholder("x")
    parameters = [graph.placeholder(f"p{i}") for i in range(count)]
    graph.placeholder("unrelated")
    for kind, i, j in uses:
        if kind == "mm":
            x = graph.call_function(torch.mm, (x, parameters[i]))
        elif kind == "add":
            x = graph.call_function(torch.add, (x, parameters[i]))
        elif kind == "view":
            x = graph.call_function(torch.add, (x, graph.call_function(torch.t, (parameters[i],))))
        else:
            both = graph.call_function(torch.mm, (parameters[i], parameters[j]))
            x = graph.call_function(torch.add, (x, both))
    graph.output((x, *(parameters[i] for i in sorted(saved))))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    with FakeTensorMode() as mode:
        FakeTensorProp(gm, mode).propagate(*(torch.empty(2, 2) for _ in range(count + 2)))
    known = {
        node: facts(
            node.name,
            process_group=draw(st.integers(0, 2)),
            nbytes=draw(st.integers(1, 100)),
            reshard_after_forward=draw(st.sampled_from([True, False, None])),
        )
        for node in parameters
    }
    for node, of_parameter in known.items():
        node.meta[PARAMETER] = of_parameter
    return gm, known, limit


class Gathering(fx.Interpreter):
    """Runs a graph whose gathers return tensors of ``fulls`` and whose inputs are empty."""

    def __init__(self, gm, fulls):
        super().__init__(gm)
        self.fulls = fulls

    def call_function(self, target, args, kwargs):
        if target is ops.all_gather_start.default:
            return [self.fulls[given.removeprefix("placeholder ")] for given in args[0]]
        if target is ops.all_gather_wait.default:
            return [*args[0], torch.empty(0)]
        return super().call_function(target, args, kwargs)


@settings(max_examples=150, deadline=None)
@given(models())
def test_each_parameter_is_gathered_once_before_its_uses_in_any_order(model):
    gm, known, bucket_bytes = model
    by_fqn = {f.fqn: f for f in known.values()}
    fulls = {f.fqn: torch.randn(2, 2, dtype=torch.float64) for f in known.values()}
    x = torch.randn(2, 2, dtype=torch.float64)
    expected = gm(x, *fulls.values(), None)

    keep = choose_kept(known, bucket_bytes)
    insert_gathers(gm, known, bucket_bytes, keep)
    chain_reductions(gm)

    buckets = [fqns_of(gather) for gather in gathers_of(gm)]
    gathered = [fqn for bucket in buckets for fqn in bucket]
    assert gathered == list(by_fqn), "all of them, in their order"
    for bucket in buckets:
        assert len({by_fqn[fqn].process_group for fqn in bucket}) == 1
        assert len(bucket) == 1 or sum(by_fqn[fqn].nbytes for fqn in bucket) <= bucket_bytes
    for node in known:
        assert all(
            user.target in (ops.all_gather_start.default, ops.all_gather_wait.default)
            or user.op == "output"
            for user in node.users
        )
    # The graph runs although inputs hold no data: uses come after their gathers.
    actual = Gathering(gm, fulls).run(x, *(f"placeholder {fqn}" for fqn in fulls), None)
    assert torch.equal(actual[0], expected[0])
    for saved, full in zip(actual[1:], expected[1:], strict=True):
        (fqn,) = (fqn for fqn in fulls if fulls[fqn] is full)
        keeps = any(node.name == fqn for node in keep)
        assert (saved is full) if keeps else (saved == f"placeholder {fqn}")
        chosen = by_fqn[fqn].reshard_after_forward
        assert chosen is None or keeps == (not chosen)
    open_ones = [known[node] for node in keep if known[node].reshard_after_forward is None]
    assert sum(parameter.nbytes for parameter in open_ones) <= bucket_bytes
