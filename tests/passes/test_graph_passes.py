"""Passes of the user's: what they declare, where they run, and what they may not be."""

import copy
import re
import types

import pytest
import torch
from support.documents import ROOT
from support.job import end, needs_a_job
from support.models import batch_of
from torch import library, nn

from deepcompile_zero3 import (
    GraphPass,
    Zero3Error,
    capture_graphs,
    compile_ahead,
    explain,
    fully_shard,
    graph_pass,
)
from deepcompile_zero3.graph_inputs import passes_of
from deepcompile_zero3.options import Options
from deepcompile_zero3.passes.facts import ParameterFacts
from deepcompile_zero3.passes.graph_pass import names_of, own_pass
from deepcompile_zero3.passes.keep import choose_kept
from deepcompile_zero3.passes.pipeline import Pipeline, in_order
from deepcompile_zero3.passes.verify.invariants import INVARIANTS

PASSES = names_of(passes_of())


def _run(passes, **options):
    model = nn.Sequential(*(fully_shard(nn.Linear(4, 4)) for _ in range(2)))
    options = {"inductor": False, "passes": passes, **options}
    run = torch.compile(fully_shard(model), backend="zero3", options=options)
    run(batch_of(2, 4)).sum().backward()


def _noting(name, ran, **declared):
    def note(gm, facts):
        ran.append((name, facts.direction, facts))

    note.__name__ = name
    return graph_pass(**declared)(note)


@needs_a_job
def test_passes_run_in_their_places():
    ran = []
    passes = [
        _noting("last", ran),
        _noting("kept", ran, graphs=("forward",), after="choose_kept"),
        _noting("also_kept", ran, graphs=("forward",), after="choose_kept", needs=("kept",)),
        _noting("raw", ran, graphs=("backward",), after="move_products_out"),
    ]
    with capture_graphs(passes=True) as graphs:
        _run(passes)

    forward = [each.name for each in graphs.passes if each.direction == "forward"]
    backward = [each.name for each in graphs.passes if each.direction == "backward"]
    assert forward[:3] == ["choose_kept", "kept", "also_kept"]
    assert [name for name in forward if name in PASSES["forward"]] == PASSES["forward"]
    assert [name for name in backward if name in PASSES["backward"]] == PASSES["backward"]
    assert backward[backward.index("move_products_out") + 1] == "raw"
    assert forward[-1] == backward[-1] == "last"
    assert [(name, direction) for name, direction, _ in ran] == [
        ("kept", "forward"),
        ("also_kept", "forward"),
        ("last", "forward"),
        ("raw", "backward"),
        ("last", "backward"),
    ]


@needs_a_job
def test_facts_are_those_of_the_parameters():
    ran = []
    _run([_noting("note", ran)], gather_bucket_mb=2, keep_mb=3)

    for _, direction, facts in ran:
        assert set(facts.parameters) == {"0.weight", "0.bias", "1.weight", "1.bias"}
        assert facts.parameters["1.weight"].nbytes == 64
        assert (facts.gather_bucket_bytes, facts.keep_bytes) == (2 * 2**20, 3 * 2**20)
        assert facts.may_keep == (
            {"0.weight", "0.bias", "1.weight", "1.bias"} if direction == "forward" else set()
        )
        with pytest.raises(TypeError):
            facts.parameters["0.weight"] = None


class _Nothing(GraphPass):
    def __call__(self, gm, facts):
        pass


class _Keyless(_Nothing):
    def uuid(self):
        return 1 / 0


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        (_Nothing(), "option 'passes' must be a list of passes"),
        ([_Nothing], "at position 0: a pass is an instance"),
        ([lambda gm, facts: None], "at position 0: a pass is an instance"),
        ([_Nothing(), _Nothing()], "two passes named '_Nothing'"),
        ([_noting("p", [], graphs="forward")], "'p' has graphs='forward'"),
        ([_noting("p", [], graphs=())], r"'p' has graphs=\(\)"),
        ([_noting("p", [], graphs=("joint",))], r"'p' has graphs=\('joint',\)"),
        ([_noting("p", [], after="insert_reduces")], "no pass over the forward graph"),
        ([_noting("p", [], after="nowhere")], "has after='nowhere'"),
        ([_noting("p", [], changes=("no_writes",))], "a tuple of 'gather_order'"),
        ([_noting("p", [], needs=("q",))], "needs 'q', which does not run before it"),
        (
            [_noting("p", [], after="choose_kept", graphs=("forward",), needs=("insert_gathers",))],
            "needs 'insert_gathers'",
        ),
        ([_noting("p", [], needs="insert_gathers")], "'p' has needs='insert_gathers'"),
        ([_noting("p", [], changes=None)], "'p' has changes=None"),
        ([_noting("p", [], uuid=lambda: "v1")], "uuid of pass 'p' is a key"),
        ([_Keyless()], "uuid of pass '_Keyless' raised ZeroDivisionError"),
        ([_noting("chain_reductions", [])], "a pass is named 'chain_reductions'"),
    ],
)
@needs_a_job
def test_what_is_no_pass_is_refused(passes, message):
    with pytest.raises(Exception, match=message):
        _run(passes)


@needs_a_job
def test_a_pass_without_a_key_stores_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiled = []
    for key in (None, None, "one", "one", "two"):
        ran = []
        torch._dynamo.reset()
        _run([_noting("note", ran, uuid=key)], inductor=True)
        compiled.append(bool(ran))
    assert compiled == [True, True, True, False, True]
    ran = []
    torch._dynamo.reset()
    _run([_noting("note", ran, uuid="one", changes=("gradients",))], inductor=True)
    assert ran


@needs_a_job
def test_a_graph_without_parameters_is_left_alone():
    ran = []
    options = {"inductor": False, "passes": [_noting("note", ran)]}
    torch.compile(lambda x: x.sin(), backend="zero3", options=options)(torch.ones(2))
    assert not ran


@needs_a_job
def test_explain_refuses_what_is_no_pass():
    with pytest.raises(ValueError, match="at position 0: a pass is an instance"):
        explain(fully_shard(nn.Linear(2, 2)), torch.ones(2, 2), options={"passes": [_Nothing]})


def test_nothing_is_compiled_ahead_with_a_pass_without_a_key():
    with pytest.raises(Zero3Error, match=r"uuid\(\) of pass '_Nothing' returns None"):
        compile_ahead(lambda: nn.Linear(2, 2), {}, world_size=2, options={"passes": [_Nothing()]})


def test_the_example_of_the_document_runs(tmp_path):
    text = (ROOT / "docs" / "passes.md").read_text()
    code = re.search(r"```python\n(import torch\n.*?)```", text, re.DOTALL)[1]
    assert len(code.splitlines()) <= 44
    module = types.ModuleType("example")
    module.__file__ = str(tmp_path / "example.py")
    (tmp_path / "example.py").write_text(code)
    exec(compile(code, module.__file__, "exec"), module.__dict__)
    try:
        module.test_small_parameters_are_kept()
    finally:
        end()


@needs_a_job
def test_the_other_passes_of_the_document_run():
    text = (ROOT / "docs" / "passes.md").read_text()
    _, code = re.findall(r"```python\n(import.*?)```", text, re.DOTALL)
    schema = "(Tensor x) -> Tensor"
    tanh = library.custom_op("mylib::tanh", torch.tanh, mutates_args=(), schema=schema)
    tanh.register_fake(torch.empty_like)
    names: dict = {}
    exec(code, names)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    reference = copy.deepcopy(model)
    fully_shard(model)
    passes = [names["tanh_as_mine"], names["halve_gradients"]]
    with capture_graphs() as graphs:
        run = torch.compile(model, backend="zero3", options={"inductor": False, "passes": passes})
        run(batch_of(2, 4)).sum().backward()
    reference(batch_of(2, 4)).sum().backward()
    assert "mylib.tanh(" in graphs.forward[0].text
    for sharded, whole in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad / 2)


def test_the_document_has_all_invariants():
    text = (ROOT / "docs" / "passes.md").read_text().partition("| invariant | promise |")[2]
    text = text.partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \| ([^|]+) \|$", text, re.MULTILINE) == [
        (name, promise) for name, (promise, _) in INVARIANTS.items()
    ]


def test_a_feature_names_a_pass_of_the_core_and_a_key():
    def mine(gm, facts):
        """Does nothing."""

    lost = own_pass(mine, mine, graphs=("forward",), after=mine, uuid=())
    with pytest.raises(ValueError, match="'mine' follows 'mine', which is no pass of the core"):
        in_order([lost])
    without_key = own_pass(mine, mine, graphs=("forward",), after=choose_kept, uuid=None)
    facts = {0: ParameterFacts(fqn="weight", process_group=0, nbytes=64)}
    assert Pipeline(facts, Options(), 0).may_be_stored
    assert not Pipeline(facts, Options(), 0, order=in_order([without_key])).may_be_stored
