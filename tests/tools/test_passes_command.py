"""The command line lists passes, and shows what each of them changes."""

from deepcompile_zero3 import __main__
from deepcompile_zero3.graph_inputs import passes_of
from deepcompile_zero3.passes.graph_pass import names_of
from deepcompile_zero3.passes.verify.invariants import INVARIANTS

PASSES = names_of(passes_of())


def test_passes_are_listed_and_shown(capsys, tmp_path):
    assert __main__.main(["passes"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for names in PASSES.values() for name in names)
    assert all(name in listed for name in INVARIANTS)

    assert __main__.main(["passes", "insert_reduces"]) == 0
    assert "+reduce_grad: f32[0] = zero3.reduce_grad(" in capsys.readouterr().out

    mine = tmp_path / "mine.py"
    mine.write_text(
        "from deepcompile_zero3 import graph_pass\n"
        "@graph_pass(graphs=('forward',))\n"
        "def tanh(gm, facts):\n"
        "    for node in gm.graph.nodes:\n"
        "        if 'tanh' in node.name:\n"
        "            node._rename('renamed')\n"
        "lambda_ = lambda gm, facts: None\n"
        "late = graph_pass(after='nothing')(lambda gm, facts: None)\n"
    )
    assert __main__.main(["passes", f"{mine}:tanh"]) == 0
    assert "+renamed: f32[2, 16] = aten.tanh(" in capsys.readouterr().out
    for name, message in {
        "nothing": "there are choose_kept,",
        f"{mine}:none": "has no 'none'",
        f"{mine}:late": "has after='nothing', which is no pass over the",
        f"{mine}:lambda_": "is a function, and not a GraphPass",
    }.items():
        assert __main__.main(["passes", name]) == 1
        assert message in capsys.readouterr().err
