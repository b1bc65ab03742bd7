"""The `moelora` command."""

from __future__ import annotations

import argparse
import sys
from typing import Sequence

from .. import __version__
from . import bench, demo, env, inspect, tune

COMMANDS = (bench, demo, env, inspect, tune)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code: 0 done, 1 a check failed, 2 wrong usage (raised by argparse)."""
    parser = argparse.ArgumentParser(prog="moelora", description="LoRA adapters on the experts of Mixture-of-Experts models.")
    parser.add_argument("--version", action="version", version=f"moelora_ops {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        command = commands.add_parser(module.NAME, help=module.HELP, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    options = parser.parse_args(argv)
    options.argv = list(sys.argv[1:] if argv is None else argv)
    code: int = options.run(options)
    return code
