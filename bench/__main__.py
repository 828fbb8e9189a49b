"""``python -m bench``: compares modes of training, whose steps alternate.

python -m bench                                          # "steps" of most workloads and modes
python -m bench -w A -m floor,zero3,fsdp2-blocks         # parts
python -m bench -w B --malloc tuned                      # without the allocator's page faults
python -m bench compile -w A -m floor,zero3              # the first step, cold and warm
python -m bench -w B -m zero3-c10d-twice,without-pool    # without one optimization
python -m bench primitives                               # of gloo, at some sizes
python -m bench overhead                                 # a step of 300 small parameters
python -m bench host                                     # the host's time by phase of a step
python -m bench hosts --rate 1gbit                       # two hosts with a link; as root
python -m bench optimizers                               # steps of Muon and AdamW on shards
python -m bench agreement -w B,deep                      # how long ranks take to agree on gradients
python -m bench gpu                                      # on a GPU: kernels, a step, what overlaps
python -m bench plan -w A,B --ranks 1 2                  # predicted steps beside measured ones
python -m bench digest -w B                              # the price of a digest at each tenth step
python -m bench saves -w B                               # steps during a save, and the next start
python -m bench stream                                   # full parameters out of ranks, and files
python -m bench offload --shape small                    # training with less memory than it takes
python -m bench table build/bench/*.json                 # earlier results
python -m bench docs docs/benchmarks.md                  # the tables of a page, measured again
"""

import argparse
import sys
from collections.abc import Sequence

from bench import (
    agreement,
    digests,
    documents,
    first_steps,
    gpu,
    host,
    hosts,
    offload,
    optimizers,
    overhead,
    planning,
    primitives,
    report,
    reprint,
    saves,
    steps,
    streams,
)
from bench.ablations import ABLATIONS
from bench.modes import MODES
from bench.workloads import WORKLOADS

# Each has add_arguments(parser) and run(arguments), whose docstring is its help.
PARTS = {
    "steps": steps,
    "compile": first_steps,
    "host": host,
    "hosts": hosts,
    "optimizers": optimizers,
    "agreement": agreement,
    "plan": planning,
    "digest": digests,
    "saves": saves,
    "stream": streams,
    "offload": offload,
    "primitives": primitives,
    "overhead": overhead,
    "gpu": gpu,
    "table": reprint,
    "docs": documents,
}


def main(arguments: Sequence[str] | None = None) -> None:
    legend = {f"mode {name}": mode.about for name, mode in (MODES | ABLATIONS).items()}
    legend |= {f"workload {name}": workload.about for name, workload in WORKLOADS.items()}
    legend |= {f"column {name}": meaning for name, meaning in report.COLUMNS.items()}
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        epilog="\n".join(f"{name:22} {meaning}" for name, meaning in legend.items()),
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parts = parser.add_subparsers(title="parts", metavar="PART", required=True)
    for name, module in PARTS.items():
        about = " ".join(str(module.run.__doc__).split())
        part = parts.add_parser(name, help=about, description=about)
        module.add_arguments(part)
        part.set_defaults(run=module.run)
    given = sys.argv[1:] if arguments is None else [*arguments]
    if not given or given[0] not in (*PARTS, "-h", "--help"):
        given = ["steps", *given]  # a part's arguments stand behind its name
    args = parser.parse_args(given)
    args.run(args)


if __name__ == "__main__":
    main()
