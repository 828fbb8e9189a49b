"""``python -m deepcompile_zero3``."""

import argparse
import sys

from deepcompile_zero3 import doctor


def main() -> int:
    """Runs a command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m deepcompile_zero3", description="ZeRO-3 as a compiler pass."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    command = commands.add_parser("doctor", help="what is installed, and whether two ranks work")
    command.set_defaults(run=doctor.main)
    return parser.parse_args().run()


if __name__ == "__main__":
    sys.exit(main())
